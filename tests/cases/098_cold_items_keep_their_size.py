"""Items that are never trained keep their size in BF16, and stay on top of the lists.

Symptom:   in bf16-true the training loss falls as in FP32; the hit rate over the whole catalogue stays far below that.
Truth:     AdamW's factor is 1 - 1.8e-3 * 1.0. BF16's spacing is 2**-7..2**-8 of a weight: the product rounds back to
           it. FP32 shrinks the embeddings of items that no user chose to 0.4 of their size; in BF16 they keep their
           first size, and rank above the right ones.
Right fix: FP32 weights (autocast BF16), or stochastic rounding / Kahan summation.
Wrong fix: a larger decay (from 2**-8 on it takes a whole spacing), more steps.
Source:    own; Nerogar/OneTrainer#996.
CUDA:      same, unless the optimizer is fused.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.2, True, 500
CATALOGUE, CHOSEN = 120, 12


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Linear(12, 16)
        self.items = nn.Parameter(torch.randn(CATALOGUE, 16))

    def forward(self, user):
        return torch.tanh(self.user(user)) @ self.items.T


def _data(seed):
    g = torch.Generator().manual_seed(seed)
    item = torch.randint(0, CHOSEN, (96,), generator=g)
    return F.one_hot(item, 12) + 0.1 * torch.randn(96, 12, generator=g), item


def _loss(scores, item):
    return F.cross_entropy(scores[:, :CHOSEN], item)


def _make(precision):
    batches = [((user,), (item,)) for user, item in map(_data, range(3))]
    return Ranker(), batches, _loss, precision, lambda m: torch.optim.AdamW(m.parameters(), 1.8e-3, weight_decay=1.0)


def metric(model):
    user, item = _data(98)
    with torch.no_grad():
        scores = model.float()(user)
    return float((scores.argmax(1) != item).float().mean())


def build():
    return _make("bf16-true")


def fixed():
    return _make("bf16-mixed")


EXPECT = dict(
    cause="decay-lost-to-rounding",
    where="optimizer.step|items",
    op="torch.optim.AdamW.step",
    fix="keep FP32 weights (bf16-mixed) or use stochastic rounding",
)
