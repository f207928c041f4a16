"""capture_target: a build() target trained up to a step, and that step captured before it is made."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from floatline.errors import ReplayError
from floatline.numerics.cuda_autocast import gpu_arithmetic
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.applied_plan import AppliedPlan
from floatline.precision.random_state import RandomState
from floatline.probe.runs.plain_loop import batches_of, first_batch
from floatline.probe.runs.runs import run_target
from floatline.probe.steps.capture import CapturedStep, capture_step
from floatline.probe.steps.origin import StepOrigin
from floatline.probe.watch.patches import Patches
from floatline.workload import Target, Workload


class _CaptureReached(BaseException):
    """The run is where the step begins. Not an Exception: the user's loop may catch those."""


def capture_target(target: Target, *, step: int, seed: int = 0) -> CapturedStep:
    """Train a build() target as `run_target` does, up to a step, and capture that one before it is made.

    Args:
        target: The loaded target.
        step: Number of the step, from 0.
        seed: Seed of the run.

    Raises:
        TargetError: The target cannot be built, or ends before that step.
    """
    made: dict[str, Any] = {"optimizer": None, "scaler": None, "random": None, "losses": 0}

    def build(seed: int = 0) -> Workload:
        workload = target.build(seed)
        accumulate = resolve_plan(workload.precision).accumulate

        def reach(module: nn.Module, inputs: Any) -> None:
            del module, inputs
            if made["losses"] == step * accumulate and torch.is_grad_enabled():
                made["random"] = RandomState.now()
                raise _CaptureReached

        def count(*values: Any) -> Tensor:
            made["losses"] += 1
            return workload.loss_fn(*values)

        def make(model: nn.Module) -> torch.optim.Optimizer:
            made["optimizer"] = workload.make_optimizer(model)
            return made["optimizer"]

        made["workload"], made["hook"] = workload, workload.model.register_forward_pre_hook(reach)
        return replace(workload, loss_fn=count, make_optimizer=make)

    patches = Patches()
    patches.wrap(torch.amp.GradScaler, "__init__", lambda original: _noting(original, made))
    try:
        with contextlib.suppress(_CaptureReached):
            run_target(replace(target, builder=build, trainer=None), steps=step + 1, seed=seed)
    finally:
        patches.undo()
        if "hook" in made:
            made["hook"].remove()
    if made["random"] is None:
        raise ReplayError(f"Target '{target.text}' does not get to step {step}. Give a step that it makes.")
    workload = cast("Workload", made["workload"])
    plan = resolve_plan(workload.precision)
    first = first_batch(workload, plan, step)
    origin = replace(origin_of(target, seed=seed, step=step), batch=first)
    loss = PlannedLoss(workload, plan)
    with gpu_arithmetic():  # as in the run
        captured = capture_step(
            workload.model,
            made["optimizer"],
            loss,
            *batches_of(workload, plan, first),
            plan=plan,
            scaler=made["scaler"],
            random_state=made["random"],
            origin=replace(origin, islands=tuple(plan.check_modules(workload.model))),
        )
    captured.around = loss.in_force
    return captured


class PlannedLoss:
    """The loss of a workload's batch, computed as a plan says while that is in force.

    Args:
        workload: Has the model and the loss function.
        plan: Names modules and functions in FP32, and rewrites.
    """

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self._plain = self._workload = workload
        self._plan = plan

    def __call__(self, batch: Any) -> Tensor:
        """The loss of one batch: inputs and targets."""
        return self._workload.compute_loss(*batch)

    @contextlib.contextmanager
    def in_force(self) -> Generator[None]:
        """Apply the plan, and take it back at the end."""
        applied = AppliedPlan(self._plain.model, self._plan, loss_fn=self._plain.loss_fn)
        self._workload = replace(self._plain, loss_fn=applied.loss_fn or self._plain.loss_fn)
        try:
            yield
        finally:
            applied.remove()
            self._workload = self._plain


def _noting(original: Any, made: dict[str, Any]) -> Any:
    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made["scaler"] = self

    return note


def origin_of(target: Target, *, seed: int, step: int) -> StepOrigin:
    """Where a step of a target comes from, with the checksum of its file."""
    code = getattr(target.builder or target.trainer, "__code__", None)
    file = Path(code.co_filename) if code is not None else None
    if file is None or not file.is_file():
        return StepOrigin(target.text, seed=seed, step=step)
    return StepOrigin(target.text, file.name, hashlib.sha256(file.read_bytes()).hexdigest(), seed, step)
