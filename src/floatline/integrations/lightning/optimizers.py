"""Optimizers of a framework's run: exchanged for 16-bit weights, with schedulers that follow, and their gradients."""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from floatline import optim
from floatline.errors import GuardError
from floatline.numerics import foreach
from floatline.optim import mesh
from floatline.plans import Plan


def exchange(optimizer: Any, plan: Plan) -> torch.optim.Optimizer:
    """The optimizer, or one of `floatline.optim` of the same kind and groups where the plan has 16-bit weights."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GuardError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer. Give one in configure_optimizers."
        )
    if plan.weights == "fp32":
        return optimizer
    if isinstance(optimizer, optim.Optimizer) and plan.update in (None, optimizer.update):
        return optimizer
    return optim.convert(optimizer, update=plan.update or "exact")


def follow(scheduler: Any, *, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Let a scheduler, and those inside of it, set the learning rates of another optimizer with the same groups."""
    for one in _nested(scheduler):
        if getattr(one, "optimizer", None) is old:
            one.optimizer = new


def count_calls(optimizer: torch.optim.Optimizer) -> None:
    """Let torch see that the optimizer's step is called: schedulers made for another one would warn that it is not."""
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _nested(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in cast("list[Any]", getattr(scheduler, "_schedulers", [])):
        yield from _nested(inner)


@torch.no_grad()
def multiply_gradients(optimizer: torch.optim.Optimizer, factor: Tensor) -> None:
    """Multiply every gradient in place, in its own format; the host waits for nothing."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in _grads(optimizer):
        kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in kinds.items():
        foreach.mul_(grads, factor.to(device))


def _grads(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                grad = mesh.local_part(param.grad)
                yield grad._values() if grad.is_sparse else grad
