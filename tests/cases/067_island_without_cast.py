"""Head protected with autocast(enabled=False) - but its input is still half.

Symptom:   RuntimeError: mat1 and mat2 must have the same dtype, right after adding "run the head in FP32".
Truth:     disabling autocast does not cast anything: the half activation from the autocast region meets FP32 weights.
Right fix: cast at the border: self.head(x.float()).
Wrong fix: self.head.half(); remove the FP32 island again (and get the overflow back).
Source:    pytorch/pytorch#38487 (comment: disable autocast *and* cast inputs)
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.4, True, 40


class Net(nn.Module):
    def __init__(self, alt):
        super().__init__()
        self.alt = alt
        self.body, self.head = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU()), nn.Linear(6, 3)

    def forward(self, x):
        f = self.body(x).mean(-1)
        with torch.autocast("cpu", enabled=False):
            return self.head(f.float() if self.alt else f)


def _make(alt):
    g = torch.Generator().manual_seed(67)
    wave = torch.randn(3, 2, 10, generator=g)
    batches = []
    for _ in range(2):
        y = torch.randint(0, 3, (16,), generator=g)
        batches.append(((wave[y] + 0.3 * torch.randn(16, 2, 10, generator=g),), (y,)))
    return Net(alt), batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 3e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="autocast-region-misuse",
    where="head|067_island_without_cast.py:27",
    code="return self.head(f.float() if self.alt else f)",
    op="aten.addmm",
    fix="cast the input at the border: self.head(f.float())",
)
