"""What the settings of a parameter group may be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from floatline.errors import OptimizerError, suggest
from floatline.optim.storage import STATES, UPDATES

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum", "dampening")
# Settings of torch.optim that change what a step computes, with what to do instead.
_UNSUPPORTED = {
    "amsgrad": "Use amsgrad=False, or torch.optim for float32 weights.",
    "differentiable": "Use differentiable=False, or torch.optim for float32 weights.",
}


def check_names(*, update: str, states: str, seed: int) -> None:
    """Refuse an update, a form of states, or a seed that does not exist."""
    if update not in UPDATES:
        raise OptimizerError(f"Update {update!r} is not known. {suggest(str(update), UPDATES)}")
    if states not in STATES:
        raise OptimizerError(f"States {states!r} are not known. {suggest(str(states), STATES)}")
    if not 0 <= seed < 2**64:
        raise OptimizerError(f"Seed {seed} is not a 64-bit number. Use 0 to 2**64 - 1.")


def check_group(group: dict[str, Any]) -> None:
    """Refuse settings that no step can be made with."""
    for name, instead in _UNSUPPORTED.items():
        if group.get(name):
            raise OptimizerError(f"{name}=True is not supported. {instead}")
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise OptimizerError(f"lr is a tensor of shape {tuple(lr.shape)}. Use one number.")
    for name in _NOT_NEGATIVE:
        value = group.get(name)
        if value is not None and not 0 <= float(value) < math.inf:
            raise OptimizerError(f"{name} is {float(value)}. Use a finite number from 0 up.")
    if "betas" in group and not _are_betas(group["betas"]):
        raise OptimizerError(f"betas are {group['betas']}. Use two numbers from 0 up to, and without, 1.")
    if group.get("nesterov") and (group["momentum"] == 0 or group["dampening"] != 0):
        raise OptimizerError(
            f"nesterov=True with momentum {group['momentum']} and dampening {group['dampening']}. "
            "Use a momentum above 0 and dampening 0."
        )


def _are_betas(betas: Any) -> bool:
    if not isinstance(betas, tuple | list) or len(cast("tuple[Any, ...]", betas)) != 2:
        return False
    return all(isinstance(beta, Real) and 0 <= float(beta) < 1 for beta in cast("tuple[Any, ...]", betas))


def check_params(params: Iterable[Any]) -> None:
    """Refuse what cannot be trained here; each is a tensor, or a name and a tensor."""
    for item in params:
        name, param = cast("tuple[str, Any]", item) if isinstance(item, tuple) else ("", item)
        if not isinstance(param, Tensor):
            continue  # torch has a good message for it
        what = f"Parameter {name!r}" if name else f"A parameter of shape {tuple(param.shape)}"
        if param.is_complex():
            raise OptimizerError(f"{what} is {param.dtype}. Train torch.view_as_real(parameter) instead.")
        if param.dtype not in _DTYPES:
            raise OptimizerError(f"{what} is {param.dtype}. Use float32, float16 or bfloat16.")
        if not (param.is_leaf or param.retains_grad):
            raise OptimizerError(f"{what} is computed from others. Pass the tensors it is computed from.")


def refuse_grad(param: Tensor, grad: Tensor) -> NoReturn:
    """Say why no step can be made with a gradient that is sparse or not floating-point."""
    what = f"The gradient of a parameter of shape {tuple(param.shape)}"
    if grad.layout != torch.strided:
        raise OptimizerError(f"{what} is sparse. Use a dense one, for example Embedding(sparse=False).")
    raise OptimizerError(f"{what} is {grad.dtype}. Use a floating-point one.")
