"""Classifier head replaced after the optimizer was built.

Symptom:   fine-tuning under AMP stays at chance level; scale grows happily, gradients are finite. FP32 does the same.
Truth:     the optimizer still holds the old head's parameters; the new head receives gradients but is never updated,
           the backbone is frozen.
Right fix: build the optimizer after the surgery (or add_param_group).
Wrong fix: unfreeze everything, raise LR, switch to BF16.
Source:    common fine-tuning mistake; own repro
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.5, False, 60


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8 * 16, 10)

    def forward(self, x):
        return self.head(torch.relu(self.f(x)).flatten(1))


def _make(alt):
    g = torch.Generator().manual_seed(71)
    proto = torch.randn(4, 1, 6, 6, generator=g)
    batches = []
    for _ in range(3):
        y = torch.randint(0, 4, (16,), generator=g)
        batches.append(((proto[y] + 0.5 * torch.randn(16, 1, 6, 6, generator=g),), (y,)))

    def make_opt(m):
        m.f.requires_grad_(False)
        if alt:
            m.head = nn.Linear(8 * 16, 4)
            return torch.optim.SGD(m.head.parameters(), 0.1)
        opt = torch.optim.SGD(m.head.parameters(), 0.1)
        m.head = nn.Linear(8 * 16, 4)
        return opt

    return Backbone(), batches, F.cross_entropy, "bf16-mixed", make_opt


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="params-not-trained",
    where="head|071_head_swapped_after_optimizer.py:42",
    code="m.head = nn.Linear(8 * 16, 4)",
    op="torch.optim.SGD",
    fix="create the optimizer after replacing the head",
)
