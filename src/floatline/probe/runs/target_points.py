"""capture_points: a workload trained in a plain loop, and steps captured at several points of it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from floatline.errors import ReplayError
from floatline.numerics.cuda_autocast import gpu_arithmetic
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.random_state import RandomState
from floatline.probe.runs.conditions import set_seeds
from floatline.probe.runs.plain_loop import PlainLoop, batches_of, first_batch
from floatline.probe.runs.target_steps import PlannedLoss, origin_of
from floatline.probe.steps.capture import CapturedStep, capture_step
from floatline.probe.steps.origin import StepOrigin
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
    are not finite and no smaller loss scale is left to try. A target is built again for each run; a workload gets its
    weights and buffers back, before the second run and at the end.

    Args:
        subject: A loaded target with build(), or a workload.
        plan: What to train in; None is the workload's own precision.
        points: Shares of the way to the failing step; 1 is that step.
        steps: Steps of the run, where it does not fail before.
        seed: Of torch, random, numpy, and of build().

    Returns:
        The steps in their order; points that fall on one step give one.

    Raises:
        ReplayError: `steps` or a point is out of range.
        TargetError: The target cannot be built.
    """
    if steps < 1 or not points or not all(0 <= point <= 1 for point in points):
        raise ReplayError(f"steps {steps} and points {tuple(points)} make no step. Give shares from 0 to 1.")
    with _kept(subject):
        last = _CapturingLoop(subject, plan, seed).run(steps).failed
        end = steps - 1 if last is None else last
    with _kept(subject):
        wanted = {round(point * end) for point in points}
        return _CapturingLoop(subject, plan, seed).run(end + 1, capture=wanted).captured


@dataclass
class _Ran:
    """What a loop gave: the step that failed, and what was captured."""

    failed: int | None
    captured: list[CapturedStep]


class _CapturingLoop:
    """The plain loop of `run_target`, in which any step can be captured before it is made."""

    def __init__(self, subject: Target | Workload, plan: Plan | str | None, seed: int) -> None:
        set_seeds(seed)
        self._target = subject if isinstance(subject, Target) else None
        self._workload = subject.build(seed) if isinstance(subject, Target) else subject
        self._plan = resolve_plan(self._workload.precision if plan is None else plan)
        self._seed = seed

    def run(self, steps: int, *, capture: Collection[int] = ()) -> _Ran:
        model = self._workload.model
        found: list[CapturedStep] = []
        skips = number = 0
        loop = PlainLoop(self._workload, self._plan)
        with gpu_arithmetic() if loop.device == "cpu" else contextlib.nullcontext():
            try:
                for number in range(steps):
                    if number in capture:
                        found.append(self._capture(number, loop))
                    losses = loop.run_backward(number)
                    known = _is_finite(losses)
                    fine = _is_finite([p.grad for p in model.parameters() if p.grad is not None])
                    skips = 0 if fine else skips + 1
                    searches = loop.scaler.is_enabled() and skips <= _LONGEST_SEARCH and loop.scaler.get_scale() > 1.0
                    if not known or not (fine or searches):
                        # Where the search for a scale is over, what failed is the first step of it.
                        return _Ran(number - max(skips - 1, 0) if known else number, found)
                    loop.update()
            except Exception:  # the user's code does not go on in this precision: its replays will say why
                return _Ran(number, found)
            finally:
                loop.close()
        return _Ran(None, found)

    def _capture(self, number: int, loop: PlainLoop) -> CapturedStep:
        plan, model = self._plan, self._workload.model
        first = first_batch(self._workload, plan, number)
        origin = StepOrigin(seed=self._seed, step=number)
        if self._target is not None:
            origin = origin_of(self._target, seed=self._seed, step=number)
        loss = PlannedLoss(self._workload, plan)
        captured = capture_step(
            model,
            loop.optimizer,
            loss,
            *batches_of(self._workload, plan, first),
            plan=plan,
            scaler=loop.scaler,
            random_state=RandomState.now(),
            origin=replace(origin, batch=first, islands=tuple(plan.check_modules(model))),
        )
        captured.around = loss.in_force
        return captured


def _is_finite(tensors: list[Tensor]) -> bool:
    return not tensors or bool(torch.stack([t.isfinite().all() for t in tensors]).all())


@contextlib.contextmanager
def _kept(subject: Target | Workload) -> Generator[None]:
    """A workload's weights, buffers and dtypes, put back at the end; a target is built again instead."""
    if isinstance(subject, Target):
        yield
        return
    before = {name: tensor.detach().clone() for name, tensor in _named_tensors(subject.model)}
    training = subject.model.training
    try:
        yield
    finally:
        for name, tensor in _named_tensors(subject.model):  # casting a model gives it new buffers
            tensor.grad = None
            tensor.data = before.get(name, tensor.data)
        subject.model.train(training)


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
