"""Two-headed model with a tiny auxiliary weight, Lion-style optimizer, pure FP16.

Symptom:   the main task trains, the auxiliary metric never improves in FP16 - in FP32 it does. No NaN, no warning.
Truth:     1e-7 * aux_loss / N gives gradients ~1e-9 for the auxiliary head: exactly 0 in half, so its (sign) update is
           0.
Right fix: scale the loss before backward (and unscale, or use a sign-invariant optimizer as here), or FP32 gradients.
Wrong fix: more epochs; "the auxiliary task is too hard"; larger LR for that head (0 * lr).
Source:    engichang1467/Open-Rig3R#35 (mixed-scale multi-task loss)
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.06, True, 80


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 12), nn.ReLU())
        self.cls, self.depth = nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, x):
        f = self.trunk(x)
        return self.cls(f), self.depth(f.detach())


def _loss(scale):
    def loss_fn(out, y, d):
        logits, depth = out
        main = F.cross_entropy(logits.float(), y)
        aux = (depth.float()[:, 0] - d.float()).pow(2).mean()
        return scale * (main + 1e-7 * aux)

    return loss_fn


def _make(scale):
    g = torch.Generator().manual_seed(30)
    x = torch.randn(48, 5, generator=g)
    y, d = x[:, :3].argmax(-1), x.relu().sum(-1) * 0.3
    return TwoHeads(), [((x,), (y, d))], _loss(scale), "fp16-true", lambda m: Lion(m.parameters(), 4e-3)


def metric(m):
    _, batches, _, _, _ = _make(1.0)
    (x,), (_, d) = batches[0]
    with torch.no_grad():
        return float((m(x)[1][:, 0] - d).pow(2).mean())


def build():
    return _make(1.0)


def fixed():
    return _make(2.0**14)


EXPECT = dict(
    cause="gradient-underflow",
    where="depth|030_auxiliary_head_never_moves.py:47",
    code="return scale * (main + 1e-7 * aux)",
    op="aten._to_copy(backward)",
    fix="scale the loss before backward",
)
