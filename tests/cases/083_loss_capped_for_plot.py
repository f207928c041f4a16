"""Loss clamped to [0, 6] "against spikes".

Symptom:   the loss reads exactly 6.0000 for ever, under AMP and FP32; gradients are exactly zero; the scale keeps
           growing.
Truth:     the initial loss is ~11 (large vocabulary, confident init), above the cap; clamp has zero gradient there, so
           nothing can ever bring it down.
Right fix: clip gradients instead of the loss (or clamp only for logging).
Wrong fix: "gradient underflow" -> raise the loss scale; higher LR; BF16.
Source:    common home-made guard; own repro
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 2.0, False, 80


class NextItem(nn.Module):
    def __init__(self, v=60, d=8):
        super().__init__()
        self.emb, self.out = nn.Embedding(v, d), nn.Linear(d, v)
        with torch.no_grad():
            self.out.weight.mul_(16)

    def forward(self, last):
        return self.out(self.emb(last))


def _loss(alt):
    def loss_fn(logits, y):
        loss = F.cross_entropy(logits.float(), y)
        return loss if alt else loss.clamp(0, 6)

    return loss_fn


def _make(alt):
    last = torch.arange(60)
    return (
        NextItem(),
        [((last,), ((last * 7 + 3) % 60,))],
        _loss(alt),
        "fp16-mixed",
        lambda m: torch.optim.Adam(m.parameters(), 5e-2),
    )


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="clamp-kills-gradient",
    where="loss_fn|083_loss_capped_for_plot.py:34",
    code="return loss if alt else loss.clamp(0, 6)",
    op="aten.clamp",
    fix="remove the clamp on the loss; clip gradients",
)
