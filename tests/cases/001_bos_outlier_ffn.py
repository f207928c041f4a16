"""Encoder with one massive-activation token: FFN output projection leaves the FP16 range.

Symptom:   the loss is finite, yet under FP16 autocast every single step is skipped and the scale falls for ever; FP32
           and BF16 train.
Truth:     for the BOS token the last block's output projection reaches ~1e5 (> 65504). The inf enters the residual
           stream; the pooled head does not read BOS, so the loss stays finite, but LayerNorm's backward over the inf
           row gives NaN for all shared weights. The LayerNorm where NaN first shows is innocent.
Right fix: run that projection (and the residual it feeds) in FP32, or use BF16; rescaling the two matrices also works.
Wrong fix: lower the learning rate or init_scale (the forward value does not depend on either); put LayerNorm in FP32
           (its input is already inf).
Source:    huggingface/transformers#5651, huggingface/transformers#9295
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.6, True, 40


class FeedForward(nn.Module):
    def __init__(self, d, alt):
        super().__init__()
        self.wi, self.wo, self.alt = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False), alt

    def forward(self, x):
        h = F.relu(self.wi(x))
        if self.alt:
            with torch.autocast("cpu", enabled=False):
                return F.linear(h.float(), self.wo.weight)
        return self.wo(h)


class Block(nn.Module):
    def __init__(self, d, alt):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out, self.ff = nn.Linear(d, 3 * d), nn.Linear(d, d), FeedForward(d, alt)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        a = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + self.out(a)
        return x + self.ff(self.n2(x))


class Encoder(nn.Module):
    def __init__(self, alt, d=16, vocab=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d, alt) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 4)
        with torch.no_grad():  # a "pretrained" checkpoint: BOS owns feature 0, block 1 amplifies it
            self.emb.weight[:, 0] = 0
            self.emb.weight[0] = 0
            self.emb.weight[0, 0] = 8
            self.blocks[1].ff.wi.weight[:4, 0] = 40
            self.blocks[1].ff.wo.weight[3, :4] = 170

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x)[:, 1:].mean(1))


def _make(alt):
    g = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(4):
        y = torch.randint(0, 4, (8,), generator=g)
        ids = torch.randint(1, 6, (8, 8), generator=g) + 5 * y[:, None]
        ids[:, 0] = 0
        batches.append(((ids,), (y,)))
    return Encoder(alt), batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.AdamW(m.parameters(), 1e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="activation-overflow",
    where="blocks.1.ff.wo|001_bos_outlier_ffn.py:32",
    code="return self.wo(h)",
    op="aten.mm",
    fix="run blocks.1.ff.wo and the residual add in FP32 (or use BF16)",
)
