"""Recurrent language model with an activation-regularisation term.

Symptom:   the logged loss is inf from the first step under FP16 and a stop-on-inf guard kills the run, although hardly
           any step is skipped and all gradients are finite.
Truth:     the penalty stands outside of autocast's region, and adds h.pow(2).sum() over time*batch*hidden in half:
           ~1e5 squares of size ~1 sum to > 65504. The derivative of a sum is finite, so only the value is lost.
Right fix: use a mean, or accumulate the penalty in FP32.
Wrong fix: multiply the penalty by 1e-6 *after* the sum (inf * 1e-6 is inf); gradient clipping; blame the recurrence.
Source:    Xilinx/brevitas#1496 (loss over many elements overflows in half); own repro
CUDA:      same; inside of the region CUDA autocast would promote sum.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.5, True, 24


class CharRNN(nn.Module):
    def __init__(self, h=10, v=6):
        super().__init__()
        self.emb, self.cell, self.out = nn.Embedding(v, h), nn.RNNCell(h, h), nn.Linear(h, v)

    def forward(self, ids):
        h, hs = None, []
        x = self.emb(ids)
        for t in range(ids.shape[1]):
            h = self.cell(x[:, t], h)
            hs.append(h)
        hs = torch.stack(hs, 1)
        return self.out(hs), hs


def _loss(alt):
    def loss_fn(out, y):
        logits, hs = out
        h = hs.float() if alt else hs
        with torch.autocast(hs.device.type, enabled=False):
            penalty = (h * h * 220).sum()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 2e-7 * penalty

    return loss_fn


def _make(alt):
    g = torch.Generator().manual_seed(10)
    seq = (torch.arange(21)[None] + torch.randint(0, 6, (16, 1), generator=g)) % 6
    return (
        CharRNN(),
        [((seq[:, :-1],), (seq[:, 1:],))],
        _loss(alt),
        "fp16-mixed",
        lambda m: torch.optim.Adam(m.parameters(), 2e-2),
    )


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="reduction-overflow",
    where="loss_fn|010_activation_penalty_rnn.py:40",
    code="penalty = (h * h * 220).sum()",
    op="aten.sum",
    fix="accumulate the penalty in FP32 (hs.float()) or use mean()",
)
