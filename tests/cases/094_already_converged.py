"""HEALTHY: fine-tuning on data the model already fits.

Symptom:   none. The loss is 5e-7 from the first step to the last and no weight moves visibly - in FP32 neither.
Truth:     nothing to learn. Tiny gradients at the optimum are not underflow that costs anything.
Right fix: none needed.
Wrong fix: raise the loss scale or the LR.
Source:    own control.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 1e-3, True, 30


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(5, 8), nn.Linear(8, 5)
        with torch.no_grad():
            self.e.weight.copy_(4 * torch.eye(5, 8))
            self.o.weight.copy_(4 * torch.eye(5, 8))
            self.o.bias.zero_()

    def forward(self, ids):
        return self.o(self.e(ids))


def _make():
    ids = torch.arange(20) % 5
    return Lookup(), [((ids,), (ids,))], F.cross_entropy, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), 1e-2)


build = fixed = _make

EXPECT = dict(
    cause="healthy",
    where="",
    op="",
    fix="none needed",
)
