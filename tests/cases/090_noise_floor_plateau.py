"""HEALTHY: regression that has reached its noise floor.

Symptom:   none. The loss is flat at 1.0 (the label noise variance) for most of the run, in FP16 mixed precision and in
           FP32.
Truth:     converged; a plateau alone is no evidence of stagnation, underflow or dead gradients.
Right fix: none needed.
Wrong fix: change precision or optimizer.
Source:    own control.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = 1.25, True, 90


def loss_fn(out, y):
    return (out.float() - y).pow(2).mean()


def _make():
    g = torch.Generator().manual_seed(90)
    batches = []
    for _ in range(30):
        x = torch.randn(64, 3, generator=g)
        batches.append(((x,), (x @ torch.tensor([[1.0], [-2.0], [0.5]]) + torch.randn(64, 1, generator=g),)))
    return nn.Linear(3, 1), batches, loss_fn, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), 0.1)


build = fixed = _make

EXPECT = dict(
    cause="healthy",
    where="",
    op="",
    fix="none needed",
)
