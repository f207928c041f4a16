"""Stays of different length, padded with NaN, and a mask that multiplies.

Symptom:   the loss is NaN from the first step on, in FP16 and in FP32; every reading that counts is finite.
Truth:     hours after the end of a stay are NaN in the table. They are encoded like the others, and their states are
           multiplied by a mask of 0 before the mean: 0 * NaN is NaN.
Right fix: fill the padded hours before they are encoded.
Wrong fix: dropping the rows (every stay has padded hours), torch.where behind the encoder (backward is NaN still).
Source:    own; ecmwf/WeatherGenerator#2723.
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.4, False, 60


class Stay(nn.Module):
    def __init__(self, fills):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 16))
        self.head = nn.Linear(16, 2)
        self.fills = fills

    def forward(self, hours, mask):
        if self.fills:
            hours = hours.masked_fill(mask[..., None] == 0, 0.0)
        states = self.encoder(hours)
        kept = states * mask[..., None]
        return self.head(kept.sum(1) / mask.sum(1, keepdim=True))


def _make(fills):
    g = torch.Generator().manual_seed(97)
    batches = []
    for _ in range(4):
        hours = torch.randn(32, 12, 6, generator=g)
        lengths = torch.randint(3, 12, (32, 1), generator=g)
        mask = (torch.arange(12) < lengths).float()
        label = ((hours[..., 0] * mask).sum(1) / lengths[:, 0].sqrt() > 0).long()
        hours[mask == 0] = float("nan")
        batches.append(((hours, mask), (label,)))
    return Stay(fills), batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 1e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="nan-times-zero",
    where="097_padded_hours_times_zero.py:30",
    code="kept = states * mask[..., None]",
    op="aten.mul",
    fix="hours.masked_fill(mask[..., None] == 0, 0.0) before the encoder",
)
