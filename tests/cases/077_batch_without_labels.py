"""Language-model batch in which every label is ignore_index.

Symptom:   NaN loss once every few hundred steps, AMP and FP32 alike; running averages and NaN guards break.
Truth:     cross_entropy(mean) over zero valid tokens is 0/0. Logits are finite and small, and the gradient of that NaN
           is zero, so no step is skipped and the weights stay healthy.
Right fix: skip such batches or divide by max(count, 1).
Wrong fix: FP32/BF16, lower LR, gradient clipping.
Source:    pytorch/pytorch#70348, pytorch/pytorch#116349, OpenRLHF/OpenRLHF#583
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.5, False, 40


class LM(nn.Module):
    def __init__(self, v=8, d=8):
        super().__init__()
        self.emb, self.out = nn.Embedding(v, d), nn.Linear(d, v)

    def forward(self, ids):
        return self.out(self.emb(ids))


def _loss(alt):
    def loss_fn(logits, y):
        if alt:
            s = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
            return s / (y != -100).sum().clamp(min=1)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)

    return loss_fn


def _make(alt):
    g = torch.Generator().manual_seed(77)
    batches = []
    for k in range(4):
        ids = torch.randint(0, 8, (8, 6), generator=g)
        y = (ids + 1) % 8
        y[:, :2] = -100
        if k == 3:
            y[:] = -100  # the prompt filled the whole window
        batches.append(((ids,), (y,)))
    return LM(), batches, _loss(alt), "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 5e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="empty-reduction",
    where="loss_fn|077_batch_without_labels.py:33",
    code="return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)",
    op="aten.nll_loss_forward",
    fix="divide by max(number of labels, 1)",
)
