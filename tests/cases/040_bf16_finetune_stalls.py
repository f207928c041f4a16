"""Fine-tuning a BF16 checkpoint with a small learning rate.

Symptom:   loss curve is a flat line in bf16-true, FP32 with the same recipe improves steadily. No NaN, gradients look
           normal.
Truth:     weights are ~1, BF16 spacing there is 2**-7..2**-8; AdamW's step is lr = 1e-4 of that size, far below half a
           spacing, so w - step rounds back to w. Almost no weight changes.
Right fix: FP32 master weights (autocast BF16), or stochastic rounding / Kahan summation.
Wrong fix: loss scaling (gradients do not underflow in BF16); longer training; raising LR until it "moves" (unstable).
Source:    meta-pytorch/torchtune#2254, pytorch/ao#1124, workofart/ml-by-hand#85
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.6, True, 150


class Gated(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.scale, self.lin, self.out = nn.Parameter(torch.ones(d)), nn.Linear(d, d), nn.Linear(d, 2)
        with torch.no_grad():
            for lin in (self.lin, self.out):
                lin.weight.copy_(torch.randn_like(lin.weight).sign() + 0.1 * torch.randn_like(lin.weight))
                lin.bias.fill_(1.0)

    def forward(self, x):
        return self.out(torch.tanh(0.2 * self.lin(x * self.scale))) * 0.3


def _make(prec):
    g = torch.Generator().manual_seed(40)
    x = torch.randn(32, 12, generator=g)
    y = (x[:, 0] + x[:, 1] > 0).long()
    return (
        Gated(),
        [((x,), (y,))],
        F.cross_entropy,
        prec,
        lambda m: torch.optim.AdamW(m.parameters(), 1.5e-3, weight_decay=0),
    )


def build():
    return _make("bf16-true")


def fixed():
    return _make("bf16-mixed")  # FP32 master weights, BF16 compute


EXPECT = dict(
    cause="update-lost-to-rounding",
    where="optimizer.step|lin.weight",
    op="torch.optim.AdamW.step",
    fix="keep FP32 master weights (bf16-mixed) or use stochastic rounding",
)
