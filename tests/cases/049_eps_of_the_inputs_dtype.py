"""RMS norm of quiet recordings whose eps is that of its input's dtype, under BF16 autocast.

Symptom:   training is finite and slow in BF16, loss near chance where FP32 is below 0.1; BF16 has the range, so range
           is ruled out, and nothing is NaN.
Truth:     torch.finfo(x.dtype).eps is 1.2e-7 in FP32 and 0.0078 in BF16. The mean square of quiet rows is 1e-5 to 1e-3:
           what is divided by is the eps, and quiet rows stay quiet.
Right fix: an eps that does not depend on the dtype: torch.finfo(torch.float32).eps, or 1e-6.
Wrong fix: a larger learning rate or gain: loud rows then are too loud.
Source:    pytorch/pytorch#189581 (nn.RMSNorm's default eps, before torch 2.7); own repro
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.2, True, 60


class Norm(nn.Module):
    def __init__(self, alt, width):
        super().__init__()
        self.alt = alt
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        eps = 1e-6 if self.alt else torch.finfo(x.dtype).eps
        power = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(power + eps) * self.gain


class Listener(nn.Module):
    def __init__(self, alt):
        super().__init__()
        self.mix = nn.Linear(12, 16, bias=False)
        self.norm = Norm(alt, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.norm(self.mix(x)))


def _make(alt):
    g = torch.Generator().manual_seed(49)
    truth = torch.randn(3, 12, generator=g)
    batches = []
    for _ in range(4):
        x = torch.randn(64, 12, generator=g)
        loudness = 10 ** (-2.5 + 1.5 * torch.rand(64, 1, generator=g))
        batches.append(((loudness * x,), ((x @ truth.t()).argmax(-1),)))
    return Listener(alt), batches, F.cross_entropy, "bf16-mixed", lambda m: torch.optim.Adam(m.parameters(), 0.01)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="eps-too-large",
    where="norm|049_eps_of_the_inputs_dtype.py:29",
    code="return x * torch.rsqrt(power + eps) * self.gain",
    op="aten.add",
    fix="torch.finfo(torch.float32).eps, or 1e-6, whatever the input's dtype",
)
