"""Decoder: causal mask plus padding mask, both filled with finfo.min.

Symptom:   NaN in pure FP16 for left-padded batches; right-padded batches and FP32 are fine.
Truth:     each mask holds torch.finfo(float16).min = -65504, a legal half. Added to each other, or to an ordinary score
           of -22, it leaves the range and becomes -inf. The first rows of a left-padded sequence are masked everywhere,
           so softmax sees all -inf -> NaN. (In FP32 finfo.min absorbs the score and the row is harmlessly uniform.)
Right fix: combine the masks as booleans and fill once.
Wrong fix: replace finfo.min by -inf (makes more rows all -inf); softmax in FP32 (input is already -inf).
Source:    huggingface/transformers#17306, NVIDIA-NeMo/Automodel#2658
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.7, True, 50


class Decoder(nn.Module):
    def __init__(self, alt, d=12, v=10):
        super().__init__()
        self.alt = alt
        self.emb, self.qkv, self.out = nn.Embedding(v, d), nn.Linear(d, 3 * d), nn.Linear(d, v)
        with torch.no_grad():  # a constant score offset, which softmax does not see
            self.qkv.weight[: 2 * d].mul_(0.3)
            self.qkv.bias[:d], self.qkv.bias[d : 2 * d] = 3.0, -3.0

    def forward(self, ids):
        x = self.emb(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = q @ k.transpose(1, 2) / 12**0.5
        n, low = ids.shape[1], torch.finfo(s.dtype).min
        future = torch.ones(n, n, dtype=torch.bool).triu(1)[None]
        pad = (ids == 0)[:, None, :]
        if self.alt:
            s = s.masked_fill(future | pad, low)
        else:
            causal = torch.zeros(1, n, n, dtype=s.dtype).masked_fill(future, low)
            padding = torch.zeros(len(ids), 1, n, dtype=s.dtype).masked_fill(pad, low)
            s = s + (causal + padding)
        return self.out(x + s.softmax(-1) @ v)


def loss_fn(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=0)


def _make(alt):
    g = torch.Generator().manual_seed(18)
    batches = []
    for _ in range(2):
        seq = 1 + (torch.arange(8)[None] + torch.randint(0, 9, (8, 1), generator=g)) % 9
        seq[:4, :3] = 0
        batches.append(((seq[:, :-1],), (seq[:, 1:],)))
    return Decoder(alt), batches, loss_fn, "fp16-true", lambda m: torch.optim.SGD(m.parameters(), 0.5)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="scalar-out-of-range",
    where="|018_two_saturated_masks.py:41",
    code="s = s + (causal + padding)",
    op="aten.add",
    fix="OR the boolean masks and fill with finfo.min once",
)
