"""Microscopy classifier fed with raw 16-bit intensities.

Symptom:   NaN at step 0 with AMP, fine without; "the first conv returns inf".
Truth:     pixel values go up to 65535 and are cast to half by autocast: anything above 65519 becomes inf in the cast,
           before the first convolution. The data is legal, it simply was never normalised; FP32 + BatchNorm hides that.
Right fix: normalise the input (divide by 65535) before the network.
Wrong fix: drop bright images; put BatchNorm in FP32 (the conv before it already overflowed); init_scale=1.
Source:    pytorch/pytorch#115500 (inputs * 1.3e5), keras-team/keras#22666 (input > 65504 overflows in the cast)
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.4, True, 30


class CellNet(nn.Module):
    def __init__(self, alt):
        super().__init__()
        self.alt = alt
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, stride=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 2),
        )

    def forward(self, raw):
        return self.body(raw / 65535.0 if self.alt else raw)


def _make(alt):
    g = torch.Generator().manual_seed(19)
    batches = []
    for _ in range(3):
        y = torch.randint(0, 2, (12,), generator=g)
        raw = 2.0e4 + 1.2e4 * torch.rand(12, 1, 10, 10, generator=g)
        raw[:, :, 3:6, 3:6] += 4.6e4 * y[:, None, None, None]
        batches.append(((raw.clamp(0, 65535).round(),), (y,)))
    return CellNet(alt), batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 2e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="input-out-of-range",
    where="body.0|019_raw_sixteen_bit_scans.py:36",
    code="return self.body(raw / 65535.0 if self.alt else raw)",
    op="aten._to_copy",
    fix="normalise the input: raw / 65535",
)
