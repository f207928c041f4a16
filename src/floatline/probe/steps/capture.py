"""capture_step: one training step as it was, to be run again in any precision beside the run it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from floatline.errors import ReplayError
from floatline.optim import mesh
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.micro_batches import Loss
from floatline.precision.random_state import RandomState
from floatline.precision.wrappers import unwrap
from floatline.probe.steps.captured_step import CapturedStep, Precision, is_half_on_cpu
from floatline.probe.steps.origin import StepOrigin
from floatline.probe.steps.replayed import Agreement, Replay, StepComparison, compare_steps

__all__ = [
    "Agreement",
    "CapturedStep",
    "Precision",
    "Replay",
    "StepComparison",
    "StepOrigin",
    "capture_step",
    "compare_steps",
]


def capture_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    compute_loss: Callable[[Any], Loss],
    *batches: Any,
    plan: Plan | str = "fp16-mixed",
    scaler: torch.amp.GradScaler | None = None,
    scale: float | None = None,
    random_state: RandomState | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    half_on_cpu: bool | None = None,
    keep_optimizer: bool = True,
    origin: StepOrigin | None = None,
) -> CapturedStep:
    """Keep a step that is about to be made, or that was skipped, so that it can be run again.

    Kept are copies of weights, buffers, optimizer state and random numbers, the modes of the modules and the state of
    autocast. Batches are kept as they are, not copied.

    Args:
        model: The model; it may be compiled, but not spread over processes.
        optimizer: What would make the update; its parameters are part of the step. None where there is none.
        compute_loss: Gives the loss of a batch with the model's weights: a tensor with one number, or (loss, weight).
            It must not count or consume anything itself.
        batches: What it is called with; more than one are micro-batches, whose gradients are averaged.
        plan: How the step computes: autocast, and clipping of the update.
        scaler: Gives the loss scale; None takes `scale`.
        scale: The loss scale; None is the scaler's, or 1.
        random_state: Random numbers of the step; None takes those of now.
        buffers: Buffers of the step by name, where they are no longer what they were.
        half_on_cpu: Whether the step was computed inside `HalfOnCPU`; None: whether one is on now.
        keep_optimizer: Copy the optimizer's state, so that the update can be replayed, too.
        origin: Where it comes from, for its bundle.

    Raises:
        ReplayError: There is no batch, or the model is spread over processes.
    """
    if not batches:
        raise ReplayError("A step without a batch cannot be replayed. Give the batch behind compute_loss.")
    inner, plan = unwrap(model), resolve_plan(plan)
    if hasattr(model, "no_sync") or any(mesh.is_distributed(p) for p in inner.parameters()):
        raise ReplayError(f"{type(model).__name__} is spread over processes. Capture a step of the plain model.")
    if scale is None:
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
    return CapturedStep(
        inner,
        optimizer,
        compute_loss,
        batches,
        plan=plan,
        scale=scale,
        # Without a scaler nothing looks at the gradients before the step is made.
        checked=plan.scaling is not None if scaler is None else scaler.is_enabled(),
        random_state=random_state or RandomState.now(),
        buffers=buffers,
        half_on_cpu=is_half_on_cpu() if half_on_cpu is None else half_on_cpu,
        keep_optimizer=keep_optimizer,
        origin=origin or StepOrigin(),
    )
