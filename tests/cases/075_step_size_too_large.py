"""Plain divergence from a learning rate that is too high.

Symptom:   under AMP the loss grows, then NaN, steps are skipped and the scale falls to nothing.
Truth:     SGD with lr=3 on this problem diverges in FP32 as well (loss doubles every step until inf). FP16 merely hits
           its limit earlier.
Right fix: lower the learning rate (or clip).
Wrong fix: loss-scale tuning, FP32 islands, BF16.
Source:    comment in pytorch/pytorch#40497 ("big lrate ... cause nan earlier"), common
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = 0.3, False, 60


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)


def loss_fn(out, y):
    return (out.float() - y).pow(2).mean()


def _make(lr):
    g = torch.Generator().manual_seed(75)
    batches = []
    for _ in range(3):
        x = torch.randn(24, 6, generator=g)
        batches.append(((x,), (2 * x[:, :1] - x[:, 1:2],)))
    return Deep(), batches, loss_fn, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), lr)


def build():
    return _make(3.0)


def fixed():
    return _make(0.05)


EXPECT = dict(
    cause="optimization-divergence",
    where="optimizer|075_step_size_too_large.py:37",
    code='return Deep(), batches, loss_fn, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), lr)',
    op="torch.optim.SGD.step",
    fix="lower the learning rate",
)
