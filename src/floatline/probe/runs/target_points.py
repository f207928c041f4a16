"""capture_points: a workload trained in a plain loop, and steps captured at several points of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from floatline.errors import ReplayError
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.dtypes import DTYPES
from floatline.precision.islands import Islands, cast_weights
from floatline.precision.random_state import RandomState
from floatline.probe.runs.target_steps import batches_of, origin_of
from floatline.probe.steps.capture import CapturedStep, capture_step
from floatline.probe.steps.captured_step import StepOrigin
from floatline.workload import Target, Workload

# Skipped steps in a row after which it is no search for a loss scale: from 2**16 it reaches 1 in 16.
_LONGEST_SEARCH = 20


def capture_points(
    subject: Target | Workload,
    plan: Plan | str | None = None,
    *,
    points: Sequence[float] = (0.0, 0.25, 0.5, 1.0),
    steps: int = 40,
    seed: int = 0,
) -> list[CapturedStep]:
    """Train a workload in a plain loop, and capture steps at several points of the run.

    It is trained twice: once to find the step at which it fails, or its last, and again from the same seed to capture
    the points, which are shares of the way there. A step fails when its loss is not finite, or its gradients
    are not finite and no smaller loss scale is left to try. A target is built anew for each run; a workload gets its
    weights and buffers back, before the second run and at the end.

    Args:
        subject: A loaded target with build(), or a workload.
        plan: What to train in; None is the workload's own precision.
        points: Shares of the way to the failing step; 1 is that step.
        steps: Steps of the run, where it does not fail before.
        seed: Of torch, random, and of build().

    Returns:
        The steps in their order; points that fall on one step give one.

    Raises:
        ReplayError: `steps` or a point is out of range.
        TargetError: The target cannot be built.
    """
    if steps < 1 or not points or not all(0 <= point <= 1 for point in points):
        raise ReplayError(f"steps {steps} and points {tuple(points)} make no step. Give shares from 0 to 1.")
    with _kept(subject):
        last = _Loop(subject, plan, seed).run(steps).failed
        end = steps - 1 if last is None else last
    with _kept(subject):
        wanted = {round(point * end) for point in points}
        return _Loop(subject, plan, seed).run(end + 1, capture=wanted).captured


@dataclass
class _Ran:
    """What a loop gave: the step that failed, and what was captured."""

    failed: int | None
    captured: list[CapturedStep]


class _Loop:
    """The plain loop of `run_target`, in which any step can be captured before it is made."""

    def __init__(self, subject: Target | Workload, plan: Plan | str | None, seed: int) -> None:
        random.seed(seed)
        self._target = subject if isinstance(subject, Target) else None
        self._workload = subject.build(seed) if isinstance(subject, Target) else subject
        torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        self._plan = resolve_plan(self._workload.precision if plan is None else plan)
        self._seed = seed

    def run(self, steps: int, *, capture: set[int] | None = None) -> _Ran:
        plan, model = self._plan, self._workload.model
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        whole = plan.weights != "fp32"
        if whole:
            cast_weights(model, plan)
        kept = tuple(plan.check_modules(model))
        islands = Islands(model, kept if plan.compute != "fp32" else ())
        optimizer = self._workload.make_optimizer(model)
        scaled = plan.scaling is not None and plan.compute == "fp16" and not whole
        init = plan.scaling.init_scale if plan.scaling is not None else 1.0
        scaler = torch.amp.GradScaler(device.type, enabled=scaled, init_scale=init)
        mixed = plan.compute != "fp32" and not whole
        model.train()
        found: list[CapturedStep] = []
        skips = number = 0
        with HalfOnCPU() if device.type == "cpu" else contextlib.nullcontext():
            try:
                for number in range(steps):
                    if number in (capture or ()):
                        found.append(self._capture(number, optimizer, scaler, kept))
                    optimizer.zero_grad(set_to_none=True)
                    loss = self._backward(number, scaler, device, mixed=mixed)
                    fine = _is_finite([p.grad for p in model.parameters() if p.grad is not None])
                    skips = 0 if fine else skips + 1
                    stuck = not scaled or skips > _LONGEST_SEARCH or scaler.get_scale() <= 1.0
                    if not bool(loss.isfinite()) or (not fine and stuck):
                        # The search for a scale is over: what failed is the first step of it.
                        return _Ran(number - max(skips - 1, 0) if bool(loss.isfinite()) else number, found)
                    self._update(optimizer, scaler)
            except Exception:  # the user's code does not go on in this precision: its replays will say why
                return _Ran(number, found)
            finally:
                islands.remove()
        return _Ran(None, found)

    def _backward(self, number: int, scaler: torch.amp.GradScaler, device: torch.device, *, mixed: bool) -> Tensor:
        plan = self._plan
        total = torch.zeros((), dtype=torch.float32, device=device)
        for batch in batches_of(self._workload, plan, self._first(number), plan.accumulate):
            with torch.autocast(device.type, dtype=DTYPES[plan.compute], enabled=mixed):
                loss = self._workload.compute_loss(*batch)
            scaler.scale(loss / plan.accumulate if plan.accumulate > 1 else loss).backward()
            total = total + loss.detach().float()
        return total

    def _update(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        clip = self._plan.clip
        if clip is not None:
            scaler.unscale_(optimizer)
            weights = list(self._workload.model.parameters())
            if clip.max_value is not None:
                nn.utils.clip_grad_value_(weights, clip.max_value)
            elif clip.max_norm is not None:
                nn.utils.clip_grad_norm_(weights, clip.max_norm, clip.norm_type)
        scaler.step(optimizer)
        scaler.update()

    def _first(self, number: int) -> int:
        return number * self._plan.accumulate % len(self._workload.batches)

    def _capture(
        self, number: int, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, kept: tuple[str, ...]
    ) -> CapturedStep:
        first = self._first(number)
        origin = StepOrigin(seed=self._seed, step=number)
        if self._target is not None:
            origin = origin_of(self._target, seed=self._seed, step=number)
        return capture_step(
            self._workload.model,
            optimizer,
            lambda batch: self._workload.compute_loss(*batch),
            *batches_of(self._workload, self._plan, first, self._plan.accumulate),
            plan=self._plan,
            scaler=scaler,
            random_state=RandomState.now(),
            origin=replace(origin, batch=first, islands=kept),
        )


def _is_finite(tensors: list[Tensor]) -> bool:
    return not tensors or bool(torch.stack([t.isfinite().all() for t in tensors]).all())


@contextlib.contextmanager
def _kept(subject: Target | Workload) -> Generator[None]:
    """A workload's weights, buffers and dtypes, put back at the end; a target is built anew instead."""
    if isinstance(subject, Target):
        yield
        return
    tensors: dict[str, Any] = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    training = subject.model.training
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            tensor.grad = None
            tensor.data = before[name]
        subject.model.train(training)
