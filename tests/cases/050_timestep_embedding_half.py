"""Sinusoidal timestep embedding computed in half for t in [0, 4000).

Symptom:   denoiser conditioned on the timestep behaves as if t were quantised; loss on the phase task is stuck in FP16
           only.
Truth:     t is cast to half before it is multiplied by the frequencies: above 2048 only even numbers exist, and the
           product t * freq keeps just 11 bits, so the fast sinusoids are noise.
Right fix: compute t * freq, sin and cos in FP32, then cast.
Wrong fix: a bigger MLP after the embedding; normalising t by 4000 in half (same lost bits).
Source:    NVIDIA/Megatron-LM#535, NVIDIA/TransformerEngine#1245
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.3, True, 60


class TimeCond(nn.Module):
    def __init__(self, alt):
        super().__init__()
        self.alt = alt
        self.mlp = nn.Linear(8, 2)

    def forward(self, t):
        dt = torch.float32 if self.alt else self.mlp.weight.dtype
        freq = 3.14159265 / torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=dt)
        ang = t.to(dt)[:, None] * freq
        return self.mlp(torch.cat([ang.sin(), ang.cos()], 1).to(self.mlp.weight.dtype))


def _make(alt):
    g = torch.Generator().manual_seed(50)
    batches = []
    for _ in range(3):
        t = torch.randint(2049, 4000, (48,), generator=g)
        batches.append(((t,), (t % 2,)))
    return TimeCond(alt), batches, F.cross_entropy, "fp16-true", lambda m: torch.optim.SGD(m.parameters(), 0.5)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="integer-not-exact",
    where="|050_timestep_embedding_half.py:29",
    code="ang = t.to(dt)[:, None] * freq",
    op="aten._to_copy",
    fix="t.float() * freq, cast the sin/cos",
)
