"""Embedding model converted with .half() and trained with Adam.

Symptom:   loss is fine at step 0, NaN at step 1; gradients are all finite.
Truth:     Adam's state is kept in the parameter dtype. Rows that get no gradient have m = v = 0, and eps = 1e-8 rounds
           to 0 in half: 0 / (sqrt(0) + 0) = NaN. Small gradients (1e-4) have v = 1e-8 -> 0 -> inf.
Right fix: FP32 master weights (autocast + FP32 parameters), or at the very least eps=1e-4.
Wrong fix: gradient clipping; lower LR (0/0 does not depend on it); GradScaler (raises for half parameters).
Source:    pytorch/pytorch#8860, afiaka87/glide-finetune#5, soumith/cudnn.torch#377
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.7, True, 60


class CBOW(nn.Module):
    def __init__(self, v=30, d=8):
        super().__init__()
        self.inp, self.out = nn.Embedding(v, d), nn.Linear(d, v)

    def forward(self, ctx):
        return self.out(self.inp(ctx).mean(1))


def _make(eps):
    g = torch.Generator().manual_seed(37)
    mid = torch.randint(1, 15, (40,), generator=g)  # half of the vocabulary never occurs
    ctx = torch.stack([mid - 1, mid + 1], 1)
    return (
        CBOW(),
        [((ctx,), (mid,))],
        F.cross_entropy,
        "fp16-true",
        lambda m: torch.optim.Adam(m.parameters(), 5e-2, eps=eps),
    )


def build():
    return _make(1e-8)


def fixed():
    return _make(1e-3)


EXPECT = dict(
    cause="optimizer-state-underflow",
    where="optimizer.step|inp.weight",
    op="torch.optim.Adam.step",
    fix="keep FP32 master weights (or eps >= 1e-4)",
)
