"""Attention pooling masked with -1e9.

Symptom:   RuntimeError: value cannot be converted to type c10::Half without overflow, only with AMP on.
Truth:     masked_fill is given a Python scalar that does not exist in FP16 (-1e9 < -65504).
Right fix: torch.finfo(scores.dtype).min, or float('-inf') when no row is fully masked, or scores.float().
Wrong fix: -1e4: no error, but it leaks attention to padding as soon as real scores are of that size, and breaks again
           when two masks are added.
Source:    NVIDIA/apex#1052, NVIDIA/apex#1105, dotnet/TorchSharp#1135
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.4, True, 30


class AttentivePool(nn.Module):
    def __init__(self, d, alt):
        super().__init__()
        self.score, self.alt = nn.Linear(d, 1), alt

    def forward(self, x, pad):
        s = self.score(x).squeeze(-1)
        fill = torch.finfo(s.dtype).min if self.alt else -1e9
        s = s.masked_fill(pad, fill)
        return (s.softmax(-1)[..., None] * x).sum(1)


class DocClassifier(nn.Module):
    def __init__(self, alt):
        super().__init__()
        self.emb = nn.Embedding(30, 12)
        self.pool = AttentivePool(12, alt)
        self.head = nn.Linear(12, 3)

    def forward(self, ids):
        return self.head(self.pool(self.emb(ids), ids == 0))


def _make(alt):
    g = torch.Generator().manual_seed(16)
    batches = []
    for _ in range(3):
        y = torch.randint(0, 3, (16,), generator=g)
        ids = torch.randint(1, 8, (16, 9), generator=g) + 7 * y[:, None]
        lens = torch.randint(3, 10, (16,), generator=g)
        ids[torch.arange(9)[None] >= lens[:, None]] = 0
        batches.append(((ids,), (y,)))
    return DocClassifier(alt), batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 3e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="scalar-out-of-range",
    where="pool|016_mask_constant_raises.py:27",
    code="s = s.masked_fill(pad, fill)",
    op="aten.masked_fill",
    fix="masked_fill(pad, torch.finfo(s.dtype).min)",
)
