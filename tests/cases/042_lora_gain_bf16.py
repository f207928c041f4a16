"""Adapter with a learnable gain of 1.0, bf16-true, cosine decay.

Symptom:   LoRA-like adapter: A/B matrices move, the per-channel gain stays exactly 1.0 in BF16; FP32 reaches a much
           lower loss.
Truth:     the gain needs to go from 1.0 to ~1.5, each Adam step is 1e-3; BF16 spacing at 1.0 is 0.0078, so 1.0 + 0.001
           rounds back to 1.0 every time.
Right fix: keep the gain (or all trainable parameters) in FP32.
Wrong fix: more steps (every one is lost); zero-init the gain (only shifts the problem to where it grows); loss scaling.
Source:    kyegomez/SingLoRA#6, d8ahazard/sd_dreambooth_extension#1415 (same arithmetic for EMA)
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = 0.02, True, 400


class Adapted(nn.Module):
    def __init__(self, keep32, d=6, r=2):
        super().__init__()
        self.keep32 = keep32
        self.base = nn.Linear(d, d, bias=False)
        with torch.no_grad():
            self.base.weight.copy_(torch.eye(d))
        self.base.weight.requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(r, d) * 0.1), nn.Parameter(torch.zeros(d, r))
        self.gain = nn.Parameter(torch.ones(d))

    def to(self, dt):  # the trainer calls model.to(bfloat16)
        super().to(dt)
        if self.keep32:
            for p in (self.A, self.B, self.gain):
                p.data = p.data.float()
        return self

    def forward(self, x):
        h = self.base(x)
        return h * self.gain.to(h.dtype) + (x @ self.A.to(h.dtype).T) @ self.B.to(h.dtype).T


def loss_fn(out, y):
    return (out.float() - y.float()).pow(2).mean()


def _make(keep32):
    g = torch.Generator().manual_seed(42)
    x = torch.randn(24, 6, generator=g)
    y = x * torch.tensor([1.35, 1.4, 1.3, 0.7, 0.65, 1.3])
    return (
        Adapted(keep32),
        [((x,), (y,))],
        loss_fn,
        "bf16-true",
        lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad], 1e-3),
    )


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="update-lost-to-rounding",
    where="gain|optimizer.step",
    op="torch.optim.Adam.step",
    fix="keep trainable parameters in FP32",
)
