"""Training steps that the tests of the recorder run with and without it."""

from contextlib import nullcontext

import torch
from torch import nn

from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.probe.trace.recorder import Recorder

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Calculation(nn.Module):
    """A module whose forward is a given function of itself and its input."""

    def __init__(self, calculate, **modules):
        super().__init__()
        self.calculate = calculate
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.calculate(self, x)


def step(make, x, *, precision="fp16-true", optimizer=None, record=True, micro_batches=1, **options):
    """One step of `make()`; returns the loss, the weights and buffers, and the recorder (None without)."""
    torch.manual_seed(0)
    model = make().train()
    dtype, _, kind = precision.partition("-")
    dtype = DTYPES[dtype]
    if kind == "true":
        model = model.to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1)))(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16-mixed", init_scale=256.0)
    recorder = Recorder(model, batch=((x,), ()), **options) if record else None
    with HalfOnCPU(), recorder or nullcontext():
        for _ in range(micro_batches):
            with torch.autocast("cpu", dtype=dtype, enabled=kind == "mixed"):
                loss = model(x).float().pow(2).mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return loss.detach(), [t.detach() for t in (*model.parameters(), *model.buffers())], recorder


def trace_of(make, x, **options):
    return step(make, x, **options)[2].trace


def same_bits(a, b):
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )


def ops_named(trace, name, phase=None):
    return [op for op in trace.ops if op.name == name and phase in (None, op.phase)]
