"""What a guard takes in: an optimizer that trains the model, weights that the plan means, and one way to clip."""

from __future__ import annotations

import math

import torch
from torch import nn

from floatline.errors import GuardError
from floatline.guard.schedules import check_rates
from floatline.optim.optimizer import Optimizer
from floatline.plans import Plan
from floatline.precision.dtypes import DTYPES
from floatline.precision.micro_batches import check_closure


def admit(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> torch.device:
    """The device of the trained parameters; GuardError where model, optimizer and plan cannot be guarded together."""
    device = check_parameters(model, optimizer)
    check_weights(optimizer, plan)
    check_gradients(optimizer)
    check_rates(optimizer)
    check_closure(optimizer)
    check_update(optimizer, plan)
    return device


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """The device of the trained parameters; GuardError where the optimizer trains something else."""
    names = {id(param): name for name, param in model.named_parameters()}
    device = None
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise GuardError(
                    f"Group {i} of the optimizer has a parameter of shape {tuple(param.shape)} that the model has not. "
                    "Make the optimizer from model.parameters(), after moving, casting or wrapping the model."
                )
            device = device or param.device
    if device is None:
        raise GuardError("The optimizer has no parameters. Make it from model.parameters().")
    return device


def check_weights(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """The plan's weights dtype is that of the weights; GuardError where none of them has it."""
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    if DTYPES[plan.weights] not in dtypes:
        have = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise GuardError(
            f"Plan '{plan.name}' trains {plan.weights} weights, and the optimizer has {have}. "
            f"Use a plan for these weights, or cast the model before making the optimizer."
        )


def check_update(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """The plan's update and states are the optimizer's; GuardError where not, and 16-bit weights would feel it."""
    asked = {key: value for key in ("update", "states") if (value := getattr(plan, key)) is not None}
    own = {key: getattr(optimizer, key) for key in asked} if isinstance(optimizer, Optimizer) else {}
    if plan.weights == "fp32" or asked == own:
        return
    how = ", ".join(f"{key}={value!r}" for key, value in {"update": "exact", **asked}.items())
    has = " and ".join(f"{key}={value!r}" for key, value in own.items()) or "neither"
    raise GuardError(
        f"Plan '{plan.name}' asks for {' and '.join(f'{key}={value!r}' for key, value in asked.items())}, and "
        f"{type(optimizer).__name__} has {has}. Make the guard with floatline.optim.convert(optimizer, {how})."
    )


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would lose FP16 gradients: unscaled in FP16, small ones are zero."""
    if isinstance(optimizer, Optimizer):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.dtype == torch.float16 and param.requires_grad:
                raise GuardError(
                    f"{type(optimizer).__name__} would train FP16 weights: its states and updates are rounded to FP16, "
                    "where eps 1e-8 is 0. Use floatline.optim, or keep the trained weights in float32."
                )


def check_clip(clip_norm: float | None, clip_value: float | None, norm_type: float) -> None:
    """Refuse bounds that would stop or reverse every step."""
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value), ("norm_type", norm_type)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value <= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GuardError(f"{name} is {value!r}. Give a number above 0; clip_norm=math.inf clips nothing.")
    if clip_norm is not None and clip_value is not None:
        raise GuardError(f"clip_norm {clip_norm:g} and clip_value {clip_value:g} are both given. Give one of them.")


def choose_clipping(
    plan: Plan, clip_norm: float | None, clip_value: float | None, norm_type: float
) -> tuple[float, float | None, float]:
    """Norm, value and kind of norm to clip by: the caller's, the plan's, or none at all."""
    if clip_norm is None and clip_value is None and plan.clip is not None:
        clip = plan.clip
        return (math.inf if clip.max_norm is None else clip.max_norm), clip.max_value, clip.norm_type
    if clip_value is not None:
        return math.inf, clip_value, norm_type
    return (math.inf if clip_norm is None else float(clip_norm)), None, norm_type
