"""One file of the data set holds NaN readings.

Symptom:   FP16 AMP: NaN loss now and then, skipped steps, the scale falls; blamed on FP16.
Truth:     a few input rows are NaN on disk. FP32 does not skip anything and is destroyed after the first bad batch.
Right fix: find and repair/drop the rows (isfinite check in the loader).
Wrong fix: BF16/FP32, lower init_scale, nan_to_num on the loss.
Source:    jinxixiang/magic_animate_unofficial#6 (maintainer: check your data), common
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.4, False, 40


def _net():
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 2))


def _make(clean):
    g = torch.Generator().manual_seed(72)
    batches = []
    for k in range(4):
        x = torch.randn(16, 5, generator=g)
        y = (x[:, 0] + x[:, 1] > 0).long()
        if k == 2:
            x[5, 3] = float("nan")
            if clean:
                ok = x.isfinite().all(1)
                x, y = x[ok], y[ok]
        batches.append(((x,), (y,)))
    return _net(), batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 2e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="bad-input-data",
    where="batches[2].inputs[0]|072_rotten_sensor_rows.py:29",
    code='x[5, 3] = float("nan")',
    op="input",
    fix="drop or repair the non-finite rows",
)
