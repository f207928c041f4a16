"""Steps that numba compiles for a CPU, where this machine's torch is seen to give the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from floatline.numerics import compiled
from floatline.numerics.split import join_master, split_master
from floatline.optim.kernels.waves import WavePart
from floatline.optim.rules import ADAM, ADAMW, UpdateRule, adam_sizes

_ORDER = ("weight", "remainder", "grad", "exp_avg", "exp_avg_sq")


def step_compiled(rule: UpdateRule, parts: list[WavePart], factor: float, *, update: str, states: str) -> bool:
    """Make the step of one group in one pass over memory, if there is a loop for it; says whether it did.

    Numerics:
        Bit for bit the same step in torch operations, which is checked once for each format on this machine: where
        torch rounds otherwise, there is no loop. Checked by tests/optim/test_compiled_steps.py.

    Args:
        rule: The arithmetic; there is a loop for AdamW, and for Adam without decay, which is the same.
        parts: Entries of one group, with weights of one dtype and gradients of one.
        factor: What gradients are multiplied by.
        update: How weights take their update; there is a loop for "exact".
        states: How states are stored; there is a loop for "fp32".
    """
    first = parts[0].flat["weight"]
    group = parts[0].entry.group
    is_adamw = rule is ADAMW or (rule is ADAM and group["weight_decay"] == 0)
    if not is_adamw or (update, states) != ("exact", "fp32") or parts[0].flat["grad"].dtype != first.dtype:
        return False
    if (
        type(first) is not Tensor
        or not first.is_cpu
        or "remainder" not in parts[0].flat
        or not 0.5 < group["betas"][0] <= 1
    ):  # lerp_ has two forms
        return False
    if sum(part.flat["weight"].numel() for part in parts) < compiled.COMPILED_FROM:
        return False
    loop = _loop_for(first.dtype)
    if loop is None:
        return False
    compiled.run_loop(
        loop, [([part.flat[name] for name in _ORDER], _numbers(group, part.step, factor)) for part in parts]
    )
    for part in parts:
        if not part.entry.weight.is_inference():
            torch.autograd.graph.increment_version(part.entry.weight)
    return True


def _numbers(group: dict[str, Any], step: float, factor: float) -> tuple[Any, ...]:
    """What the loop multiplies by, each rounded to float32 as torch rounds it."""
    import numpy as np  # numba has brought it

    beta1, beta2 = group["betas"]
    size, correction = adam_sizes(group, step)
    sign = -1.0 if group["maximize"] else 1.0
    decay = 1 - float(group["lr"]) * group["weight_decay"]
    numbers = (sign * factor, decay, 1 - beta1, beta2, 1 - beta2, correction, group["eps"], size)
    return tuple(map(np.float32, numbers))


@functools.cache
def _loop_for(dtype: torch.dtype) -> Callable[..., object] | None:
    """The loop for a format, if it can be compiled and gives the bits of torch here."""
    if compiled.split_loops() is None:
        return None
    from floatline.optim.kernels import adamw_numba

    loop = cast("Any", adamw_numba).STEPS[str(dtype)]
    return loop if _is_the_same(loop, dtype) else None


def _is_the_same(loop: Callable[..., object], dtype: torch.dtype) -> bool:
    """Whether three steps with the loop have the bits of three steps in torch operations."""
    generator = torch.Generator().manual_seed(0)
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "maximize": False}
    master = torch.randn(4099, generator=generator)  # whole vectors, and a rest
    states = {name: [torch.zeros_like(master)] for name in ADAMW.state_names}
    weight, remainder = split_master(master, dtype)
    master = join_master(weight, remainder)
    own = [torch.zeros_like(master) for _ in states]
    for step in (1.0, 2.0, 3.0):
        grad = (torch.randn(master.shape, generator=generator) * 0.01).to(dtype)
        ADAMW.update([master], [grad.float() * 0.3], states, [step], group)
        compiled.run_loop(loop, [((weight, remainder, grad, *own), _numbers(group, step, 0.3))])
    expected: list[Tensor] = [*split_master(master, dtype), *(states[name][0] for name in ADAMW.state_names)]
    return all(map(torch.equal, (weight, remainder, *own), expected))
