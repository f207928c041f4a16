"""What a trainer does to a workload's parts before the guard sees them: batches placed, the optimizer checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from floatline import optim
from floatline.errors import GuardError
from floatline.guard.nested import map_tensors
from floatline.guard.run import DTYPES
from floatline.plan import Plan


def place(tree: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The same structure with its tensors on the device, and floating-point ones in the dtype.

    Args:
        tree: A tensor, or lists, tuples, mappings and dataclasses with tensors in them.
        device: Where tensors go; those in pinned memory without waiting.
        dtype: Format of 16- and 32-bit floating-point tensors; None leaves it.
    """

    def move(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.dtype in DTYPES.values() else tensor.dtype
        return tensor.to(device, wanted, non_blocking=True)

    return map_tensors(move, tree)


def take_optimizer(optimizer: Any, plan: Plan) -> torch.optim.Optimizer:
    """The optimizer, with the plan's update; GuardError where it would round updates of 16-bit weights away."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GuardError(f"make_optimizer gave a {type(optimizer).__name__}. It must give a torch.optim.Optimizer.")
    if plan.weights == "fp32":
        return optimizer
    if plan.update is not None:
        return optim.convert(optimizer, update=plan.update)
    if isinstance(optimizer, optim.Optimizer):
        return optimizer
    name = type(optimizer).__name__
    advice = f"floatline.optim.{name}" if hasattr(optim, name) else "an optimizer of floatline.optim"
    raise GuardError(
        f"Plan '{plan.name}' has {plan.weights} weights, and {name} rounds small updates of 16-bit weights to nothing. "
        f"Use {advice} in make_optimizer, or a plan with fp32 weights"
        + ("; 'update: exact' in the plan swaps it." if hasattr(optim, name) else ".")
    )
