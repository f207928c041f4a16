"""Neural ODE integrated with many small Euler steps in half.

Symptom:   the learned dynamics look random and the loss is stuck in FP16, the same code fits in FP32; finer steps make
           the FP16 result *worse*.
Truth:     x = x + dt * f(x) with dt = 1e-3: the increment (~2e-4) is below half a spacing of x ~ 1 in FP16, so the
           state does not move at all.
Right fix: keep the state (accumulator) in FP32, evaluate f in half if you like.
Wrong fix: more, smaller steps; a bigger network; higher LR.
Source:    tensorflow/tensorflow#27544 (serial half accumulation), own ODE repro
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = 0.01, True, 25


class ODE(nn.Module):
    def __init__(self, alt, n=150, T=0.15):
        super().__init__()
        self.alt, self.n, self.dt = alt, n, T / n
        self.w = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x):
        if self.alt:
            x = x.float()
        for _ in range(self.n):
            x = x + self.dt * torch.tanh(x.to(self.w.dtype) @ self.w).to(x.dtype)
        return x


def loss_fn(x, y):
    return 50 * (x.float() - y.float()).pow(2).mean()


def _make(alt):
    g = torch.Generator().manual_seed(46)
    x = 1.2 + 0.3 * torch.rand(12, 2, generator=g)
    y = x + 0.15 * torch.tanh(x @ torch.tensor([[0.25, 0.1], [-0.5, 0.2]]))
    return ODE(alt), [((x,), (y,))], loss_fn, "fp16-true", lambda m: torch.optim.SGD(m.parameters(), 0.05)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="accumulator-stagnation",
    where="|046_euler_steps_vanish.py:29",
    code="x = x + self.dt * torch.tanh(x.to(self.w.dtype) @ self.w).to(x.dtype)",
    op="aten.add",
    fix="keep the integrator state in FP32",
)
