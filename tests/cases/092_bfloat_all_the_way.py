"""HEALTHY: bf16-true with a learning rate that survives rounding.

Symptom:   none. Weights, gradients and momentum in BF16; small weights, large enough steps; some updates round away,
           most do not, and the loss goes where FP32 goes.
Truth:     pure BF16 is not a failure by itself.
Right fix: none needed.
Wrong fix: FP32 master weights (costs memory, gains nothing here).
Source:    own control.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.35, True, 80


class Conv1(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.o = nn.Conv1d(1, 8, 5), nn.Linear(8, 2)

    def forward(self, x):
        return self.o(torch.relu(self.c(x)).amax(-1))


def _make():
    g = torch.Generator().manual_seed(92)
    t = torch.arange(16) * 0.8
    batches = []
    for _ in range(3):
        y = torch.randint(0, 2, (24,), generator=g)
        x = torch.sin(t[None] * (1 + y[:, None])) + 0.3 * torch.randn(24, 16, generator=g)
        batches.append(((x[:, None],), (y,)))
    return Conv1(), batches, F.cross_entropy, "bf16-true", lambda m: torch.optim.SGD(m.parameters(), 0.2, momentum=0.9)


build = fixed = _make

EXPECT = dict(
    cause="healthy",
    where="",
    op="",
    fix="none needed",
)
