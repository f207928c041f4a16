"""What the settings of a parameter group may be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from floatline.errors import OptimizerError, suggest
from floatline.numerics.orthogonal import NS_DTYPES, scale_of
from floatline.optim.storage import STATES, UPDATES

_ADJUSTMENTS = ("original", "match_rms_adamw")
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
        if name not in group:
            continue
        value = group[name]
        if not isinstance(value, (Real, Tensor)):
            raise OptimizerError(f"{name} is {value!r}. Use a finite number from 0 up.")
        if not 0 <= float(value) < math.inf:
            raise OptimizerError(f"{name} is {float(value)}. Use a finite number from 0 up.")
    if "betas" in group and not _are_betas(group["betas"]):
        raise OptimizerError(f"betas are {group['betas']}. Use two numbers from 0 up to, and without, 1.")
    if "ns_dtype" in group:
        _check_newton_schulz(group)
    elif group.get("nesterov") and (group["momentum"] == 0 or group["dampening"] != 0):
        raise OptimizerError(
            f"nesterov=True with momentum {group['momentum']} and dampening {group['dampening']}. "
            "Use a momentum above 0 and dampening 0."
        )


def _check_newton_schulz(group: dict[str, Any]) -> None:
    """Refuse what no Newton–Schulz iteration can be made with."""
    dtype, adjust = group["ns_dtype"], group["adjust_lr_fn"]
    if dtype not in NS_DTYPES:
        raise OptimizerError(f"ns_dtype {dtype!r} is not known. {suggest(str(dtype), NS_DTYPES)}")
    if adjust is not None and adjust not in _ADJUSTMENTS:
        raise OptimizerError(f"adjust_lr_fn {adjust!r} is not known. {suggest(str(adjust), _ADJUSTMENTS)}")
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    if not isinstance(steps, int) or not 1 <= steps < 100:
        raise OptimizerError(f"ns_steps is {steps}. Use a whole number from 1 to 99.")
    if len(coefficients) != 3 or not all(isinstance(one, Real) and math.isfinite(one) for one in coefficients):
        raise OptimizerError(f"ns_coefficients are {coefficients}. Use three finite numbers.")
    scale_of(dtype, tuple(coefficients), steps)  # refuses what does not fit the dtype


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
