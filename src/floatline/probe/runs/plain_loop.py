"""The plain loop over a workload's batches, as its plan says, without a guard."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from floatline import optim
from floatline.plans import Clip, Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.applied_plan import AppliedPlan
from floatline.precision.dtypes import DTYPES
from floatline.precision.islands import cast_weights
from floatline.probe.watch.loop import Watch
from floatline.workload import Workload

"""Of what a plan computes in."""


def train_plainly(workload: Workload, seen: Watch, steps: int) -> None:
    """Train a workload for some steps; the watch is told the targets of each batch."""
    plan = resolve_plan(workload.precision)
    model = workload.model
    whole = plan.weights != "fp32"  # weights and batches in 16 bits, no autocast
    if whole and plan.fp32_modules:
        cast_weights(model, plan)
    elif whole:
        model.to(DTYPES[plan.compute])
    optimizer = workload.make_optimizer(model)
    if whole and plan.update is not None:
        optimizer = optim.convert(optimizer, update=plan.update)
    applied = AppliedPlan(model, plan, loss_fn=workload.loss_fn)
    try:
        _train_steps(replace(workload, loss_fn=applied.loss_fn or workload.loss_fn), plan, optimizer, seen, steps)
    finally:
        applied.remove()


def _train_steps(workload: Workload, plan: Plan, optimizer: Optimizer, seen: Watch, steps: int) -> None:
    model, dtype, whole = workload.model, DTYPES[plan.compute], plan.weights != "fp32"
    device = next((p.device.type for p in model.parameters()), "cpu")
    scaler = _make_scaler(plan, device, enabled=plan.compute == "fp16" and not whole)
    mixed = plan.compute != "fp32" and not whole
    model.train()
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for part in range(plan.accumulate):
            inputs, targets = workload.batches[(step * plan.accumulate + part) % len(workload.batches)]
            if whole:
                inputs, targets = _cast(inputs, dtype), _cast(targets, dtype)
            seen.targets = tuple(targets)
            with torch.autocast(device, dtype=dtype) if mixed else contextlib.nullcontext():
                loss = workload.compute_loss(inputs, targets)
            scaler.scale(loss if plan.accumulate == 1 else loss / plan.accumulate).backward()
        if plan.clip is not None:
            scaler.unscale_(optimizer)
            _clip(model, plan.clip)
        scaler.step(optimizer)
        scaler.update()


def _clip(model: nn.Module, clip: Clip) -> None:
    if clip.max_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), clip.max_value)
    elif clip.max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip.max_norm, clip.norm_type)


def _make_scaler(plan: Plan, device: str, *, enabled: bool) -> torch.amp.GradScaler:
    if plan.scaling is None or not enabled:
        return torch.amp.GradScaler(device, enabled=False)
    scaling = plan.scaling
    return torch.amp.GradScaler(
        device,
        init_scale=scaling.init_scale,
        growth_factor=scaling.growth_factor,
        backoff_factor=scaling.backoff_factor,
        growth_interval=scaling.growth_interval,
    )


def _cast(values: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    def cast_one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(tree_map(cast_one, list(values)))
