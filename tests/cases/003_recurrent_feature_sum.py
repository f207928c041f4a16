"""Lane-style spatial message passing: a feature map that doubles at every hop.

Symptom:   FP16 autocast gives NaN loss at once; turning AMP off or switching to BF16 cures it. anomaly mode points at
           the GroupNorm that follows.
Truth:     x = x + relu(conv(shift(x))) is iterated; magnitudes grow geometrically and pass 65504 inside the loop.
Right fix: normalise inside the loop (or damp the message), or run the loop in FP32.
Wrong fix: smaller weight decay / more warmup (nothing to do with it); eps in GroupNorm; clamp to 65504 afterwards
           (finite but the information and its gradient are gone).
Source:    ZJULearning/resa#48
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.35, True, 40


class MessagePass(nn.Module):
    def __init__(self, c, hops, alt):
        super().__init__()
        self.conv, self.hops, self.alt = nn.Conv2d(c, c, (1, 5), padding=(0, 2), bias=False), hops, alt
        with torch.no_grad():  # starts as a plain copy of the neighbour row
            self.conv.weight.zero_()
            self.conv.weight[range(c), range(c), 0, 2] = 1.0

    def forward(self, x):
        for k in range(self.hops):
            msg = F.relu(self.conv(torch.roll(x, 1 + k % 3, dims=2)))
            x = (x + msg) * 0.5 if self.alt else x + msg
        return x


class LaneNet(nn.Module):
    def __init__(self, alt):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.spread = MessagePass(4, 18, alt)
        self.head = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))

    def forward(self, img):
        return self.head(self.spread(self.stem(img)))


def _make(alt):
    g = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(2):
        img = torch.rand(3, 1, 10, 10, generator=g)
        cols = torch.randint(0, 10, (3,), generator=g)
        mask = torch.zeros(3, 1, 10, 10)
        for i, c in enumerate(cols):
            img[i, :, :, c] += 2
            mask[i, :, :, c] = 1
        batches.append(((img,), (mask,)))

    def loss_fn(out, mask):
        return F.binary_cross_entropy_with_logits(out, mask, pos_weight=torch.tensor(4.0))

    return LaneNet(alt), batches, loss_fn, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 2e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="activation-overflow",
    where="spread|003_recurrent_feature_sum.py:31",
    code="x = (x + msg) * 0.5 if self.alt else x + msg",
    op="aten.add",
    fix="average instead of sum inside the loop, or run spread in FP32",
)
