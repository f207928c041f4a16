"""Text detector with an approximate binarisation step 1 / (1 + exp(-k x)).

Symptom:   finite loss, but the gradients are NaN: under FP16 every step is skipped, the scale goes to 0. FP32 is fine.
Truth:     the step is taken outside of autocast, on half maps: exp(-50 * x) overflows to inf in half once x < -0.22.
           The forward 1/(1+inf) = 0 looks right; the backward multiplies 0 by inf = NaN.
Right fix: torch.sigmoid(k * x) (stable by construction).
Wrong fix: clamp the output map; add eps to the denominator; smaller init_scale.
Source:    mindee/doctr#1409 (formula), open-mmlab/mmocr#1375
CUDA:      same; inside of the region CUDA autocast would promote exp.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.3, True, 40


class DBHead(nn.Module):
    def __init__(self, alt, k=50):
        super().__init__()
        self.k, self.alt = k, alt
        self.feat = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.prob, self.thresh = nn.Conv2d(4, 1, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, img):
        f = self.feat(img)
        logits = self.prob(f)
        p, t = torch.sigmoid(logits), torch.sigmoid(self.thresh(f))
        with torch.autocast(p.device.type, enabled=False):
            if self.alt:
                b = torch.sigmoid(self.k * (p - t))
            else:
                b = 1 / (1 + torch.exp(-self.k * (p - t)))
        return logits, b


def loss_fn(out, y):
    logits, b = (o.float() for o in out)
    dice = 1 - 2 * (b * y).mean() / (b.mean() + y.mean() + 1e-4)
    return F.binary_cross_entropy_with_logits(logits, y) + 0.5 * dice


def _make(alt):
    g = torch.Generator().manual_seed(12)
    batches = []
    for _ in range(2):
        y = (torch.rand(2, 1, 5, 5, generator=g) > 0.6).float().repeat_interleave(3, 2).repeat_interleave(3, 3)
        batches.append(((3 * y + 0.3 * torch.randn(y.shape, generator=g),), (y,)))
    return DBHead(alt), batches, loss_fn, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 3e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="exp-overflow",
    where="|012_steep_step_function.py:34",
    code="b = 1 / (1 + torch.exp(-self.k * (p - t)))",
    op="aten.exp",
    fix="use torch.sigmoid(k * (p - t))",
)
