"""Labels sorted independently of the inputs.

Symptom:   AMP training "does not converge": loss stays at ln(4); nothing is NaN, no step is skipped.
Truth:     labels were shuffled against the images (wrong join key). There is nothing to learn; FP32 has the same flat
           curve.
Right fix: repair the join.
Wrong fix: BF16, loss scaling, other optimizers - a precision tool must not claim a precision cause here.
Source:    common; own repro
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.9, False, 60


def _make(clean):
    g = torch.Generator().manual_seed(74)
    proto = torch.randn(4, 1, 6, 6, generator=g)
    batches = []
    for _ in range(30):
        y = torch.randint(0, 4, (12,), generator=g)
        x = proto[y] + 0.5 * torch.randn(12, 1, 6, 6, generator=g)
        label = y if clean else torch.randint(0, 4, (12,), generator=g)
        batches.append(((x,), (label,)))
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4))
    return model, batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 1e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="bad-input-data",
    where="batches[*].targets[0]|074_shuffled_label_column.py:26",
    code="label = y if clean else torch.randint(0, 4, (12,), generator=g)",
    op="input",
    fix="repair the label join; not a precision problem",
)
