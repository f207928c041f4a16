"""HEALTHY: activations around 2.5e4, safely inside FP16.

Symptom:   none. Peak activation 2.5e4 (39% of the FP16 maximum) on every step, no overflow, trains like FP32.
Truth:     large is not overflow. A tool may mention low head-room at most; it must not name it a cause of failure.
Right fix: none needed.
Wrong fix: upcast or rescale a layer that works.
Source:    own control.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.3, True, 60


class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.out = nn.Linear(5, 10), nn.LayerNorm(10), nn.Linear(10, 3)
        with torch.no_grad():
            self.up.weight.mul_(1.6e4)

    def forward(self, x):
        return self.out(self.norm(self.up(x)))


def _make():
    g = torch.Generator().manual_seed(88)
    batches = []
    for _ in range(3):
        x = torch.randn(24, 5, generator=g).clamp(-1.5, 1.5)
        batches.append(((x,), (x[:, :3].argmax(-1),)))
    return (
        Loud(),
        batches,
        F.cross_entropy,
        "fp16-mixed",
        lambda m: torch.optim.Adam([*m.norm.parameters(), *m.out.parameters()], 5e-2),
    )


build = fixed = _make

EXPECT = dict(
    cause="healthy",
    where="",
    op="",
    fix="none needed",
)
