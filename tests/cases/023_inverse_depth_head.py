"""Depth network predicting disparity: depth = 1 / disparity.

Symptom:   loss is finite and sensible, yet GradScaler halves the scale at almost every step until it is < 1e-6; nothing
           trains.
Truth:     forward focal/0.002 = 500 fits, but the derivative -1/x**2 = 2.5e5 does not: the gradient of the reciprocal
           overflows in half at any loss scale, the forward pass never shows a non-finite value.
Right fix: take the reciprocal in FP32 (disp.float()).
Wrong fix: lower init_scale (still overflows at scale 1); eps of 1e-6; gradient clipping.
Source:    NVIDIA/apex#318, NVIDIA/apex#834 (scale falls to 0 with finite loss); own repro
CUDA:      same for tensor / tensor (div); `1 / x` is a reciprocal and would be promoted by CUDA autocast.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = 60.0, True, 80


class DepthNet(nn.Module):
    def __init__(self, alt):
        super().__init__()
        self.alt = alt
        self.register_buffer("focal", torch.tensor(1.0))
        self.conv = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))
        nn.init.constant_(self.conv[2].bias, -4.5)

    def forward(self, img):
        disp = torch.sigmoid(self.conv(img))
        if self.alt:
            disp = disp.float()
        return self.focal / (disp * 0.2)


def loss_fn(depth, gt):
    return (depth.float() - gt).abs().mean()


def _make(alt):
    g = torch.Generator().manual_seed(23)
    batches = []
    for _ in range(3):
        img = torch.rand(3, 1, 8, 8, generator=g)
        batches.append(((img,), (150 + 250 * img,)))
    return DepthNet(alt), batches, loss_fn, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 2e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="gradient-overflow",
    where="|023_inverse_depth_head.py:31",
    code="return self.focal / (disp * 0.2)",
    op="DivBackward0",
    fix="self.focal / (disp.float() * 0.2)",
)
