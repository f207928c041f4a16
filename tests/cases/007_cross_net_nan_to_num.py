"""Recommender cross network with a nan_to_num bandage.

Symptom:   CTR model: loss used to be NaN in FP16; somebody added torch.nan_to_num and now it is finite but AUC stays at
           0.5 and the loss does not move. No skipped steps.
Truth:     x0 * (W x) multiplies two ~700-sized halves: the product leaves the FP16 range. nan_to_num replaces the inf
           by a constant, whose gradient is zero, so the features that matter can not learn.
Right fix: form the products in FP32 (or scale the features); remove the bandage.
Wrong fix: nan_to_num / clamp (this case), higher LR, more data.
Source:    own repro; the inf -> clamp bandage is the one discussed in huggingface/transformers#9295 and #10956
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.45, True, 80


class Cross(nn.Module):
    def __init__(self, d, alt):
        super().__init__()
        self.lin, self.alt = nn.Linear(d, d), alt
        with torch.no_grad():
            self.lin.weight.copy_(torch.eye(d))

    def forward(self, x0, x):
        w = self.lin(x)
        if self.alt:
            return x0.float() * w.float() + x.float()
        return torch.nan_to_num(x0 * w + x, nan=0.0, posinf=6e4, neginf=-6e4)


class DCN(nn.Module):
    def __init__(self, alt, fields=4, d=4):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(20, d) for _ in range(fields))
        self.cross = nn.ModuleList(Cross(fields * d, alt) for _ in range(2))
        self.inp = nn.Linear(fields * d, fields * d, bias=False)
        self.bn, self.out = nn.BatchNorm1d(fields * d), nn.Linear(fields * d, 1)
        with torch.no_grad():
            self.inp.weight.copy_(torch.eye(fields * d))
            for e in self.emb:  # embeddings exported by an upstream job that never normalised them
                e.weight.copy_(torch.randn(20, d).sign() * 700 + 20 * torch.randn(20, d))
                e.weight.requires_grad_(False)

    def forward(self, ids):
        x0 = self.inp(torch.cat([e(ids[:, i]) for i, e in enumerate(self.emb)], 1))
        x = x0
        for c in self.cross[:1]:
            x = c(x0, x)
        return self.out(self.bn(x)).squeeze(1)


def _make(alt):
    g = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    model = DCN(alt)
    batches = []
    with torch.no_grad():
        for _ in range(3):
            ids = torch.randint(0, 20, (24, 4), generator=g)
            e = model.emb[1](ids[:, 1])
            batches.append(((ids,), ((e[:, 0].abs() > 700).float(),)))
    return (
        model,
        batches,
        F.binary_cross_entropy_with_logits,
        "fp16-mixed",
        lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad], 2e-2),
    )


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="product-overflow",
    where="cross.0|007_cross_net_nan_to_num.py:31",
    code="return torch.nan_to_num(x0 * w + x, nan=0.0, posinf=6e4, neginf=-6e4)",
    op="aten.mul",
    fix="multiply in FP32 (x0.float() * w.float()) and drop nan_to_num",
)
