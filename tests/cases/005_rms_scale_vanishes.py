"""Hand-written RMS normalisation whose output is silently all zero.

Symptom:   no NaN, no skipped step - the loss just sits at ln(C) in pure FP16; FP32 learns quickly.
Truth:     the hidden state is ~400 per feature, its square passes 65504 -> inf, rsqrt(inf) = 0, so the layer returns
           exactly 0 and the network is blind. Nothing non-finite leaves the layer.
Right fix: upcast to FP32 before squaring.
Wrong fix: bigger eps (inf + eps is inf); higher LR; loss scaling (there is no gradient to scale).
Source:    pytorch/pytorch#133085, microsoft/onnxruntime#29034 (all-zero output)
CUDA:      same in pure FP16; under CUDA autocast pow is promoted to FP32, x*x is not.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.6, True, 60


class RMS(nn.Module):
    def __init__(self, d, alt):
        super().__init__()
        self.g, self.alt = nn.Parameter(torch.ones(d)), alt

    def forward(self, x):
        y = x.float() if self.alt else x
        ms = (y * y).mean(-1, keepdim=True)
        return (y * torch.rsqrt(ms + 1e-6)).to(x.dtype) * self.g


class Mixer(nn.Module):
    def __init__(self, alt, d=24):
        super().__init__()
        self.inp = nn.Linear(10, d)
        self.norm = RMS(d, alt)
        self.token, self.channel = nn.Linear(6, 6), nn.Linear(d, d)
        self.head = nn.Linear(d, 3)
        with torch.no_grad():
            self.inp.weight.mul_(700)

    def forward(self, x):
        h = self.norm(self.inp(x))
        h = h + self.token(h.transpose(1, 2)).transpose(1, 2)
        h = h + F.gelu(self.channel(h))
        return self.head(h.mean(1))


def _make(alt):
    g = torch.Generator().manual_seed(5)
    centre = torch.randn(3, 6, 10, generator=g)
    batches = []
    for _ in range(4):
        y = torch.randint(0, 3, (16,), generator=g)
        batches.append(((centre[y] + 0.3 * torch.randn(16, 6, 10, generator=g),), (y,)))
    return (
        Mixer(alt),
        batches,
        F.cross_entropy,
        "fp16-true",
        lambda m: torch.optim.SGD([p for n, p in m.named_parameters() if not n.startswith("inp")], 0.1),
    )


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="product-overflow",
    where="norm|005_rms_scale_vanishes.py:26",
    code="ms = (y * y).mean(-1, keepdim=True)",
    op="aten.mul",
    fix="compute the mean square in FP32 (x.float()) and cast the normalised result back",
)
