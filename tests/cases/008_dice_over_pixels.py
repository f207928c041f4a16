"""Segmentation with a soft Dice loss over all pixels of a large crop.

Symptom:   dice loss is NaN (or exactly 1.0) with pure FP16, only for large crops; 128x128 crops train.
Truth:     the three sums run over ~10^5 pixels of values near 1 and pass 65504: inf/inf. Every element is in [0, 1].
Right fix: sum in FP32 (probs.float()), or use means instead of sums - the ratio is the same.
Wrong fix: larger smooth constant (inf + 1 is inf); lower LR; blame the network output (it is perfectly finite).
Source:    qubvel-org/segmentation_models.pytorch#463, NVIDIA/apex#592
CUDA:      same in pure FP16; CUDA autocast promotes sum to FP32.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = 0.1, True, 16


class TinySeg(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.tensor(0.2)), nn.Parameter(torch.tensor(0.5))
        self.pool = nn.AvgPool2d(3, 1, 1)

    def forward(self, img):
        return torch.sigmoid(self.gain * self.pool(img) + self.bias)


def _dice(alt):
    def loss_fn(p, y):
        if alt:
            p, y = p.float(), y.float()
        inter = (p * y).sum()
        total = p.sum() + y.sum()
        return 1 - (2 * inter + 1) / (total + 1)

    return loss_fn


def _make(alt):
    g = torch.Generator().manual_seed(8)
    batches = []
    for _ in range(2):
        y = torch.zeros(1, 1, 352, 352)
        y[..., 20:300, 30:330] = 1
        batches.append(((6 * (y - 0.6) + torch.randn(y.shape, generator=g),), (y,)))
    return TinySeg(), batches, _dice(alt), "fp16-true", lambda m: torch.optim.SGD(m.parameters(), 2.0)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="reduction-overflow",
    where="loss_fn|008_dice_over_pixels.py:32",
    code="total = p.sum() + y.sum()",
    op="aten.sum",
    fix="do the Dice sums in FP32",
)
