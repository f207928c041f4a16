"""Feature standardiser using E[x^2] - E[x]^2 in half.

Symptom:   NaN in FP16 from sqrt of a negative variance, for features with a large offset; FP32 fine.
Truth:     mean ~ 30, std ~ 0.2: the two terms are ~900 +- 0.5 spacing, their difference (0.04) is pure rounding error
           and comes out negative.
Right fix: subtract the mean first (two-pass / torch.var), or do it in FP32.
Wrong fix: clamp(min=0) + eps (then it divides by sqrt(eps) and explodes); bigger eps (turns the feature off).
Source:    lucidrains/vector-quantize-pytorch#106 (same cancellation, negative radicand); variance form own repro
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.4, True, 60


class Standardise(nn.Module):
    def __init__(self, alt):
        super().__init__()
        self.alt = alt

    def forward(self, x):
        mu = x.mean(0, keepdim=True)
        if self.alt:
            var = ((x - mu) ** 2).mean(0, keepdim=True)
        else:
            var = (x * x).mean(0, keepdim=True) - mu * mu
        return (x - mu) / (var + 1e-4).sqrt()


class SensorNet(nn.Module):
    def __init__(self, alt):
        super().__init__()
        self.std = Standardise(alt)
        self.mlp = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2))

    def forward(self, x):
        return self.mlp(self.std(x))


def _make(alt):
    g = torch.Generator().manual_seed(51)
    batches = []
    for _ in range(3):
        z = torch.randn(32, 4, generator=g)
        batches.append(((30 + 0.2 * z + torch.arange(4),), ((z[:, 0] > z[:, 1]).long(),)))
    return SensorNet(alt), batches, F.cross_entropy, "fp16-true", lambda m: torch.optim.SGD(m.parameters(), 0.3)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="cancellation",
    where="std|051_one_pass_variance.py:29",
    code="var = (x * x).mean(0, keepdim=True) - mu * mu",
    op="aten.sub",
    fix="two-pass variance ((x - mu)**2).mean() or FP32",
)
