"""The arithmetic of each optimizer, once, on lists of float32 tensors; nothing about dtypes, scaling or storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from floatline.numerics import foreach
from floatline.numerics.orthogonal import newton_schulz

UpdateName = Literal["exact", "stochastic", "kahan", "nearest"]
StatesName = Literal["fp32", "bf16", "int8"]
States = dict[str, list[Tensor]]
Update = Callable[[list[Tensor], list[Tensor], States, list[float], dict[str, Any]], None]


@dataclass(frozen=True)
class UpdateRule:
    """One optimizer: its name, the states it keeps, and what it does to a weight.

    Args:
        name: "adamw", "adam", "sgd", "lion" or "muon".
        state_names: States kept for each parameter, named as in torch.optim.
        update: Changes weights and states in place; arguments: weights, gradients (not modified), states by name,
            steps including this one, and the parameter group. All tensors are float32.
        whole: Whether an element depends on others, so that a matrix cannot be cut into pieces.
        others: Rules that a group may choose instead, by what its "algorithm" says.
    """

    name: str
    state_names: tuple[str, ...]
    update: Update
    whole: bool = False
    others: Mapping[str, UpdateRule] = field(default_factory=dict[str, "UpdateRule"], compare=False)

    def of(self, group: dict[str, Any]) -> UpdateRule:
        """The rule that a group follows: this one, or the one that it has chosen."""
        return self.others.get(group.get("algorithm", self.name), self)

    def states_for(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The states that a group's parameters need: none for SGD without momentum."""
        # A group that was loaded from another optimizer's checkpoint may carry a momentum that means nothing here.
        without = self.name == "sgd" and group["momentum"] == 0
        return () if without else self.of(group).state_names


class RuledOptimizer(torch.optim.Optimizer):
    """An optimizer that follows a rule: which one, and how its weights and states are stored.

    Attributes:
        rule: The arithmetic.
        update: How 16-bit weights are stored: a name of `storage.UPDATES`.
        states: How its states are stored: a name of `storage.STATES`.
    """

    rule: UpdateRule
    update: UpdateName
    states: StatesName


def _adam(params: list[Tensor], grads: list[Tensor], states: States, steps: list[float], group: dict[str, Any]) -> None:
    """Adam with the decay in the gradient."""
    grads = _with_decay(params, _signed(grads, group), group)
    _adam_step(params, grads, states, steps, group)


def _adamw(
    params: list[Tensor], grads: list[Tensor], states: States, steps: list[float], group: dict[str, Any]
) -> None:
    """Adam with the decay in the weight."""
    if group["weight_decay"] != 0:
        foreach.mul_(params, 1 - float(group["lr"]) * group["weight_decay"])
    _adam_step(params, _signed(grads, group), states, steps, group)


def _adam_step(
    params: list[Tensor], grads: list[Tensor], states: States, steps: list[float], group: dict[str, Any]
) -> None:
    beta1, beta2 = group["betas"]
    exp_avgs, exp_avg_sqs = states["exp_avg"], states["exp_avg_sq"]
    foreach.lerp_(exp_avgs, grads, 1 - beta1)
    foreach.mul_(exp_avg_sqs, beta2)
    foreach.addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    sizes = [adam_sizes(group, step) for step in steps]
    denominators = foreach.sqrt(exp_avg_sqs)
    foreach.div_(denominators, [correction for _, correction in sizes])
    foreach.add_(denominators, group["eps"])
    foreach.addcdiv_(params, exp_avgs, denominators, [size for size, _ in sizes])


def adam_sizes(group: dict[str, Any], step: float) -> tuple[float, float]:
    """How far a step goes along the mean, with its sign, and what the root of the squares is divided by."""
    beta1, beta2 = group["betas"]
    return (float(group["lr"]) / (1 - beta1**step)) * -1, _root(1 - beta2**step)


def _root(x: float) -> float:
    """The square root; NaN below 0, which only a damaged counter gives, and where Python goes on to complex numbers."""
    return x**0.5 if x >= 0 else math.nan


def _sgd(params: list[Tensor], grads: list[Tensor], states: States, steps: list[float], group: dict[str, Any]) -> None:
    """Gradient descent, with momentum and Nesterov's form of it."""
    lr, momentum = float(group["lr"]), group["momentum"]
    grads = _with_decay(params, _signed(grads, group), group)
    if momentum != 0:
        buffers = states["momentum_buffer"]
        keep = 1 - group["dampening"]
        # torch starts the buffer with the first gradient itself, undampened.
        for buffer, grad, step in zip(buffers, grads, steps, strict=True):
            if step == 1:
                buffer.copy_(grad)
        later = [i for i, step in enumerate(steps) if step != 1]
        if later:
            moving = [buffers[i] for i in later]
            foreach.mul_(moving, momentum)
            foreach.add_(moving, [grads[i] for i in later], alpha=keep)
        grads = list(foreach.add(grads, buffers, alpha=momentum)) if group["nesterov"] else buffers
    foreach.add_(params, grads, alpha=-lr)


def _lion(
    params: list[Tensor],
    grads: list[Tensor],
    states: States,
    steps: list[float],  # noqa: ARG001
    group: dict[str, Any],
) -> None:
    """The sign of a momentum that leans towards the newest gradient (Chen et al. 2023, arXiv:2302.06675)."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    grads = _signed(grads, group)
    exp_avgs = states["exp_avg"]
    if group["weight_decay"] != 0:
        foreach.mul_(params, 1 - lr * group["weight_decay"])
    directions = foreach.mul(exp_avgs, beta1)
    foreach.add_(directions, grads, alpha=1 - beta1)
    foreach.sign_(directions)
    foreach.add_(params, directions, alpha=-lr)
    foreach.mul_(exp_avgs, beta2)
    foreach.add_(exp_avgs, grads, alpha=1 - beta2)


def _muon(
    params: list[Tensor],
    grads: list[Tensor],
    states: States,
    steps: list[float],  # noqa: ARG001
    group: dict[str, Any],
) -> None:
    """A momentum with its singular values brought near 1 (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""
    for param, grad, buffer in zip(params, grads, states["momentum_buffer"], strict=True):
        direction, scale = turn(momentum_direction(grad, buffer, group), group)
        move_along(param, direction, scale, group, shape=param.shape)


def momentum_direction(grad: Tensor, buffer: Tensor, group: dict[str, Any]) -> Tensor:
    """Muon's first part, element by element: the momentum led on, and where it points, which may be the buffer."""
    grad = grad.neg() if group["maximize"] else grad
    buffer.lerp_(grad, 1 - group["momentum"])
    return grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def turn(direction: Tensor, group: dict[str, Any]) -> tuple[Tensor, float]:
    """Muon's second part, on whole matrices: the direction made orthogonal, and what that is to be divided by."""
    return newton_schulz(
        direction,
        group["ns_dtype"],
        coefficients=tuple(group["ns_coefficients"]),
        steps=group["ns_steps"],
        eps=group["eps"],
    )


def move_along(weight: Tensor, direction: Tensor, scale: float, group: dict[str, Any], *, shape: torch.Size) -> None:
    """Muon's third part, element by element; the step's size depends on the shape of the whole matrix."""
    lr = float(group["lr"])
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        size = 0.2 * math.sqrt(max(rows, columns))
    else:
        size = math.sqrt(max(1, rows / max(columns, 1)))
    if group["weight_decay"] != 0:
        weight.mul_(1 - lr * group["weight_decay"])
    weight.add_(direction, alpha=-(lr * size) / scale)


def _signed(grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    return list(foreach.neg(grads)) if group["maximize"] else grads


def _with_decay(params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    if group["weight_decay"] == 0:
        return grads
    return list(foreach.add(grads, params, alpha=group["weight_decay"]))


ADAM = UpdateRule("adam", ("exp_avg", "exp_avg_sq"), _adam)
ADAMW = UpdateRule("adamw", ("exp_avg", "exp_avg_sq"), _adamw)
SGD = UpdateRule("sgd", ("momentum_buffer",), _sgd)
LION = UpdateRule("lion", ("exp_avg",), _lion)
MUON = UpdateRule("muon", ("momentum_buffer",), _muon, whole=True, others={"adamw": ADAMW})
