"""Click model in pure FP16 with Adagrad.

Symptom:   NaN in exactly the rows of rare ids after the first step; loss NaN from step 2.
Truth:     Adagrad's accumulator (sum of g**2) is half: for g = 1e-4 it is 0, and eps = 1e-10 is 0 too, so the update is
           g / 0 = inf (0/0 = NaN for untouched rows).
Right fix: FP32 parameters/optimizer state, or eps=1e-3 with initial_accumulator_value > 0.
Wrong fix: eps=1e-8 (still 0 in half); gradient clipping.
Source:    google-deepmind/optax#1769 (same 0/0 for the Adam family in float16)
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.4, True, 60


class FM(nn.Module):
    def __init__(self, users=20, items=16, k=4):
        super().__init__()
        self.u, self.i, self.b = nn.Embedding(users, k), nn.Embedding(items, k), nn.Parameter(torch.zeros(1))

    def forward(self, user, item):
        return (self.u(user) * self.i(item)).sum(-1) + self.b


def _make(safe):
    g = torch.Generator().manual_seed(39)
    user, item = torch.randint(0, 12, (96,), generator=g), torch.randint(0, 10, (96,), generator=g)
    y = ((user + item) % 2).float()
    kw = dict(eps=1e-3, initial_accumulator_value=0.01) if safe else {}
    return (
        FM(),
        [((user, item), (y,))],
        F.binary_cross_entropy_with_logits,
        "fp16-true",
        lambda m: torch.optim.Adagrad(m.parameters(), 0.2, **kw),
    )


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="optimizer-state-underflow",
    where="optimizer.step|u.weight",
    op="torch.optim.Adagrad.step",
    fix="FP32 state, or eps=1e-3 and a non-zero initial accumulator",
)
