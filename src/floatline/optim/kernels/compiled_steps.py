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
from floatline.optim.rules import ADAM, ADAMW, SGD, UpdateRule, adam_sizes

_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "maximize": False}
_SGD = {"lr": 1e-2, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.01, "maximize": False}
# What each loop is tried with before it is used: whole vectors and a rest, of so many elements that a root which is
# wrong in its last bit once in 200 shows in the weights, which are most often right again.
_TRIED = (1 << 17) + 3
_SAMPLES: dict[str, tuple[UpdateRule, tuple[dict[str, Any], ...]]] = {
    "adamw": (ADAMW, (_ADAMW,)),
    "sgd": (SGD, (_SGD, {**_SGD, "weight_decay": 0.0})),
    "momentum": (
        SGD,
        (
            {**_SGD, "momentum": 0.9, "dampening": 0.3},
            {**_SGD, "momentum": 0.9, "nesterov": True},
            {**_SGD, "momentum": 0.9, "weight_decay": 0.0},
        ),
    ),
}


def step_compiled(rule: UpdateRule, parts: list[WavePart], factor: float, *, update: str, states: str) -> bool:
    """Make the step of one group in one pass over memory, if there is a loop for it; says whether it did.

    Numerics:
        Bit for bit the same step in torch operations, which is checked once for each format on this machine: where
        torch rounds otherwise, there is no loop. Checked by tests/optim/test_compiled_steps.py.

    Args:
        rule: The arithmetic; there are loops for AdamW, Adam without decay, and SGD.
        parts: Entries of one group, with weights of one dtype and gradients of one.
        factor: What gradients are multiplied by.
        update: How weights take their update; there is a loop for "exact".
        states: How states are stored; there is a loop for "fp32".
    """
    first, group = parts[0].flat["weight"], parts[0].entry.group
    name = _name_of(rule, group)
    if name is None or (update, states) != ("exact", "fp32") or parts[0].flat["grad"].dtype != first.dtype:
        return False
    if type(first) is not Tensor or not first.is_cpu or "remainder" not in parts[0].flat:
        return False
    if sum(part.flat["weight"].numel() for part in parts) < compiled.COMPILED_FROM:
        return False
    loop = _loop_for(name, first.dtype)
    if loop is None:
        return False
    order = ("weight", "remainder", "grad", *rule.states_for(group))
    numbers = {step: _numbers(name, group, step, factor) for step in {part.step for part in parts}}
    jobs = [([part.flat[key] for key in order], numbers[part.step]) for part in parts]
    compiled.run_loop(loop, jobs)
    for part in parts:
        if not part.entry.weight.is_inference():
            torch.autograd.graph.increment_version(part.entry.weight)
    return True


def _name_of(rule: UpdateRule, group: dict[str, Any]) -> str | None:
    """Which loop makes a group's step."""
    if rule is SGD:
        return "sgd" if group["momentum"] == 0 else "momentum"
    is_adamw = rule is ADAMW or (rule is ADAM and group["weight_decay"] == 0)
    return "adamw" if is_adamw and group["betas"][0] > 0.5 else None  # lerp_ has another form below


def _numbers(name: str, group: dict[str, Any], step: float, factor: float) -> tuple[Any, ...]:
    """What the loop computes with, each rounded to float32 as torch rounds it."""
    import numpy as np  # numba has brought it

    lr, decay = float(group["lr"]), group["weight_decay"]
    factor = -factor if group["maximize"] else factor
    if name == "adamw":
        beta1, beta2 = group["betas"]
        size, correction = adam_sizes(group, step)
        numbers = (factor, 1 - lr * decay, 1 - beta1, beta2, 1 - beta2, correction, group["eps"], size)
    else:
        numbers = (factor, decay, -lr)
    if name == "momentum":
        momentum = group["momentum"]
        numbers += (step == 1, momentum, 1 - group["dampening"], momentum if group["nesterov"] else 0.0)
    return tuple(map(np.float32, numbers))


@functools.cache
def _loop_for(name: str, dtype: torch.dtype) -> Callable[..., object] | None:
    """The loop for a format, if it can be compiled and gives the bits of torch here."""
    if compiled.split_loops() is None:
        return None
    from floatline.optim.kernels import steps_numba

    loops = cast("Any", steps_numba).STEPS[name, str(dtype)]
    return next((loop for loop in loops if _is_the_same(name, loop, dtype)), None)


def _is_the_same(name: str, loop: Callable[..., object], dtype: torch.dtype) -> bool:
    """Whether three steps with the loop have the bits of three steps in torch operations."""
    rule, groups = _SAMPLES[name]
    return all(_follows(rule, group, name, loop, dtype) for group in groups)


def _follows(
    rule: UpdateRule, group: dict[str, Any], name: str, loop: Callable[..., object], dtype: torch.dtype
) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, remainder = split_master(torch.randn(_TRIED, generator=generator, device="cpu"), dtype)
    master = join_master(weight, remainder)
    states = {key: [torch.zeros_like(master)] for key in rule.states_for(group)}
    own = [torch.zeros_like(master) for _ in states]
    for step in (1.0, 2.0, 3.0):
        grad = (torch.randn(master.shape, generator=generator, device="cpu") * 0.01).to(dtype)
        rule.update([master], [grad.float() * 0.3], states, [step], group)
        compiled.run_loop(loop, [((weight, remainder, grad, *own), _numbers(name, group, step, 0.3))])
    expected: list[Tensor] = [*split_master(master, dtype), *(values[0] for values in states.values())]
    return all(map(torch.equal, (weight, remainder, *own), expected))
