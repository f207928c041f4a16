"""Rotary position encoding with positions built in the model dtype (bf16-true).

Symptom:   BF16 model can not tell neighbouring positions apart beyond ~256: copy-from-previous-token stays half-solved,
           the loss stops at 0.8; FP32 solves it. FP16 breaks later (> 2048).
Truth:     torch.arange(n, dtype=bfloat16) is not exact above 256: 1024 and 1025..1028 are the same number, so the
           rotation angles of neighbours are equal.
Right fix: build positions and angles in FP32, cast cos/sin at the end.
Wrong fix: larger rope base; longer training; loss scaling.
Source:    huggingface/transformers#29285, KellerJordan/modded-nanogpt#39, NVIDIA/Megatron-LM#535
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.5, True, 60


class RotaryCopy(nn.Module):
    """Attends by relative position only: q and k are constants turned by the rotary angle."""

    def __init__(self, alt, d=16, v=4, offset=1024):
        super().__init__()
        self.alt, self.offset, self.d = alt, offset, d
        self.q, self.k = nn.Parameter(torch.randn(d // 2, 2)), nn.Parameter(torch.randn(d // 2, 2))
        self.val, self.out = nn.Embedding(v, v), nn.Parameter(torch.tensor(1.0))
        with torch.no_grad():
            self.val.weight.copy_(torch.eye(v))
        self.val.weight.requires_grad_(False)

    def turn(self, vec, n):
        dt = torch.float32 if self.alt else vec.dtype
        pos = torch.arange(self.offset, self.offset + n).to(dt)
        freq = torch.tensor([3.14159 / 2**i for i in range(self.d // 2)], dtype=dt)
        ang = pos[:, None] * freq[None]
        c, s = ang.cos().to(vec.dtype), ang.sin().to(vec.dtype)
        return torch.stack([vec[:, 0] * c - vec[:, 1] * s, vec[:, 0] * s + vec[:, 1] * c], -1).flatten(1)

    def forward(self, ids):
        n = ids.shape[1]
        s = self.turn(self.q, n) @ self.turn(self.k, n).T
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(), torch.finfo(s.dtype).min / 2)
        att = s.softmax(-1)
        return self.out * 6 * (att @ self.val(ids))


def loss_fn(logits, y):
    return F.cross_entropy(logits[:, 1:].float().flatten(0, 1), y[:, 1:].flatten())


def _make(alt):
    g = torch.Generator().manual_seed(48)
    batches = []
    for _ in range(2):
        ids = torch.randint(0, 4, (8, 12), generator=g)
        batches.append(((ids,), (torch.roll(ids, 1, 1),)))  # target: the previous token
    return RotaryCopy(alt), batches, loss_fn, "bf16-true", lambda m: torch.optim.SGD(m.parameters(), 1.0)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="integer-not-exact",
    where="|048_rotary_positions_bf16.py:34",
    code="pos = torch.arange(self.offset, self.offset + n).to(dt)",
    op="aten._to_copy",
    fix="positions and angles in FP32",
)
