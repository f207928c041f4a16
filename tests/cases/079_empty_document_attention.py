"""Cross-attention to retrieved documents, with a -inf mask; some queries retrieved nothing.

Symptom:   NaN loss in AMP, skipped steps; FP32 has NaN weights after one such batch.
Truth:     a fully masked row gives softmax over all -inf = NaN, in any precision. -inf in the scores is intended; the
           empty row is the bug.
Right fix: handle rows without keys explicitly (where(any, softmax, 0)), or keep one always-visible null key.
Wrong fix: BF16/FP32; loss scaling; nan_to_num after softmax (backward still NaN).
Source:    pytorch/pytorch#41508, pytorch/pytorch#24816, pytorch/pytorch#131060
CUDA:      same (F.scaled_dot_product_attention is safe in recent versions, hand-written attention is not).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.5, False, 60


class Retrieve(nn.Module):
    def __init__(self, alt, d=8):
        super().__init__()
        self.alt = alt
        self.q, self.k, self.v, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 2)

    def forward(self, query, docs, n_docs):
        s = (self.q(query)[:, None] @ self.k(docs).transpose(1, 2))[:, 0] / 8**0.5
        hidden = torch.arange(docs.shape[1])[None] >= n_docs[:, None]
        if self.alt:
            hidden = hidden & (n_docs > 0)[:, None]
        a = s.masked_fill(hidden, float("-inf")).softmax(-1)
        if self.alt:
            a = a * (n_docs > 0)[:, None]
        return self.out((a[:, None] @ self.v(docs))[:, 0] + query)


def _make(alt):
    g = torch.Generator().manual_seed(79)
    batches = []
    for _ in range(3):
        q, docs = torch.randn(12, 8, generator=g), torch.randn(12, 4, 8, generator=g)
        n = torch.randint(1, 5, (12,), generator=g)
        n[4] = 0
        batches.append(((q, docs, n), ((q[:, 0] > 0).long(),)))
    return Retrieve(alt), batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 2e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="fully-masked-softmax",
    where="|079_empty_document_attention.py:30",
    code='a = s.masked_fill(hidden, float("-inf")).softmax(-1)',
    op="aten._softmax",
    fix="treat rows without keys separately",
)
