"""Two-tower retrieval: cosine similarity with some empty user histories.

Symptom:   NaN in pure FP16 as soon as a batch has a new user (empty history); FP32 is fine with the same data.
Truth:     x / (x.norm() + 1e-8): the guard 1e-8 is not representable in FP16 (rounds to 0), so an all-zero vector gives
           0 / 0. In FP32 the guard works.
Right fix: eps >= 1e-4 for half, or normalise in FP32.
Wrong fix: 1e-12 (smaller still); nan_to_num after the division (its backward is NaN); drop new users.
Source:    huggingface/diffusers#13316, pytorch/pytorch#33596
CUDA:      same (add/div follow the dtype; norm() alone is promoted under autocast).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 1.3, True, 60


class TwoTower(nn.Module):
    def __init__(self, eps, items=12, d=8):
        super().__init__()
        self.eps = eps
        self.item = nn.Embedding(items, d)
        self.item_out = nn.Embedding(items, d)

    def unit(self, v):
        n = (v * v).sum(-1, keepdim=True).clamp(min=0)
        n = torch.where(n > 0, n, torch.ones_like(n)).sqrt() * (n > 0)
        return v / (n + self.eps)

    def forward(self, hist, keep, cand):
        m = keep[..., None].to(self.item.weight.dtype)
        user = (self.item(hist) * m).sum(1) * 0.25
        return 8 * torch.einsum("bd,bcd->bc", self.unit(user), self.unit(self.item_out(cand)))


def _make(eps):
    g = torch.Generator().manual_seed(24)
    batches = []
    for k in range(3):
        topic = torch.randint(0, 3, (16,), generator=g)
        hist = torch.randint(0, 4, (16, 4), generator=g) + 4 * topic[:, None]
        keep = torch.ones(16, 4)
        keep[k] = 0  # one brand-new user
        cand = torch.randint(0, 4, (16, 3), generator=g) + 4 * torch.arange(3)[None]
        batches.append(((hist, keep, cand), (topic,)))
    return TwoTower(eps), batches, F.cross_entropy, "fp16-true", lambda m: torch.optim.SGD(m.parameters(), 0.2)


def build():
    return _make(1e-8)


def fixed():
    return _make(1e-3)


EXPECT = dict(
    cause="eps-underflow",
    where="|024_padded_history_cosine.py:29",
    code="return v / (n + self.eps)",
    op="aten.div",
    fix="eps >= 1e-4 in FP16 (or normalise in FP32)",
)
