"""run_target and trace_target: a target is run as it is, or in FP32 or BF16, and watched."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from floatline.errors import TargetError
from floatline.plans.presets import resolve_plan
from floatline.precision.dtypes import DTYPES
from floatline.precision.islands import Islands
from floatline.probe.runs.conditions import Change, LimitReached, Precision, changed, prepared, time_limit
from floatline.probe.runs.failures import Failure, describe_failure
from floatline.probe.runs.plain_loop import train_plainly
from floatline.probe.runs.records import RunRecord, fill_record, find_bad_tensors
from floatline.probe.trace.recorder import GradientRecorder
from floatline.probe.trace.storages import batch_tensors
from floatline.probe.trace.trace import Trace
from floatline.probe.watch.events import NewOptimizerEvent
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.watch import watch
from floatline.workload import Target

_STEPS = 40
_MOST = 30  # times the limit of a step: what a whole run may take

__all__ = ["Change", "Precision", "RunRecord", "replay_step", "run_target", "trace_target"]


class _StepReached(BaseException):
    """The step that was asked for is over: the rest of the run is not needed."""


def run_target(
    target: Target,
    *,
    steps: int | None = None,
    seed: int = 0,
    precision: Precision | None = None,
    change: Change | None = None,
    limit: float = 120.0,
) -> RunRecord:
    """Run a target from a seed and watch it.

    A workload is trained in a plain loop over its batches: the loss inside autocast, then scale, backward, clip, step
    and update, as its plan says. A plan with FP32 weights and FP16 compute has a GradScaler; 16-bit weights get the
    model and the batches cast, and none. A train() function runs as it is; what it prints goes to stderr. Without a
    GPU, 16-bit products are computed as a GPU does (`HalfOnCPU`).

    Args:
        target: The loaded target.
        steps: Steps of a workload (None is 40); handed to train() only where it takes `steps` and one is given.
        seed: For torch, random and numpy, set before the target builds anything.
        precision: 'fp32' or 'bf16' overrules the precision of the code; None leaves it.
        change: What is done otherwise, such as modules in FP32; its loss factor is for `replay_step` only.
        limit: Seconds without a step after which the run counts as endless; with steps, 30 times as many.

    Returns:
        The record. An exception of the user's loop is in it, not raised.

    Raises:
        TargetError: The target cannot be built, trains no step, needs arguments, or does not end.
    """
    record = _new_record(target, precision)
    began = time.perf_counter()
    change = change or Change()
    keep = _keep_islands(record, change)
    light = precision == "fp32"  # what the loop calls is seen in the run as it is

    last = -1

    def follow() -> None:
        nonlocal last
        if seen.step != last:
            last = seen.step
            go_on()
            if time.perf_counter() - began > _MOST * limit:
                raise LimitReached

    with prepared(target, precision, seed), changed(change, in_step=lambda: False), watch(light=light) as seen:
        seen.callbacks.forward = lambda module, _: keep(module)
        seen.callbacks.event = follow
        with time_limit(limit) as go_on:
            try:
                _run(target, record, seen, steps=steps, seed=seed)
            except LimitReached:
                raise TargetError(
                    f"Target '{target.text}' did not end: after {seen.step} steps in "
                    f"{time.perf_counter() - began:.0f} seconds it was stopped. Give it fewer steps."
                ) from None
    record.seconds = time.perf_counter() - began
    fill_record(record, seen)
    if not record.losses and record.exception is None:
        raise TargetError(f"Target '{target.text}' ran no backward pass. It must train at least one step.")
    return record


def trace_target(
    target: Target, *, step: int, steps: int | None = None, seed: int = 0, precision: Precision | None = None
) -> Trace:
    """Run a target again from the seed and record one step of it.

    Args:
        target: The loaded target.
        step: Number of the step, as in a RunRecord's events.
        steps: Of the whole run, for a train() that takes them: a schedule may depend on it. The run ends after `step`.
        seed: As in `run_target`.
        precision: As in `run_target`.

    Raises:
        TargetError: The target ends before that step, or no module is called in it.
    """
    return replay_step(target, step=step, steps=steps, seed=seed, precision=precision)[1]


def replay_step(
    target: Target,
    *,
    step: int,
    steps: int | None = None,
    seed: int = 0,
    precision: Precision | None = None,
    change: Change | None = None,
) -> tuple[RunRecord, Trace]:
    """Run a target again from the seed, with a change, up to a step, and record that one.

    Args:
        target: The loaded target.
        step: Number of the step, as in a RunRecord's events.
        steps: As in `trace_target`.
        seed: As in `run_target`.
        precision: As in `run_target`.
        change: What is done otherwise.

    Returns:
        What the run showed until then, and the trace of the step.

    Raises:
        TargetError: The target ends before that step, or no module is called in it.
    """

    record = _new_record(target, precision)
    change = change or Change()
    keep = _keep_islands(record, change)
    originals = _originals(target, seed, step)
    with (
        prepared(target, precision, seed),
        changed(change, in_step=lambda: seen.step == step),
        watch(light=True) as seen,
    ):
        recording = StepRecording(seen, step, record, originals, on_forward=keep)

        def end_after() -> None:
            recording.note_event()
            if recording.recorder is not None and seen.step > step:
                raise _StepReached

        seen.callbacks.event = end_after
        try:
            with contextlib.suppress(_StepReached):
                _run(target, record, seen, steps=step + 1 if target.builder else steps, seed=seed)
        finally:
            trace = recording.finish()
    if trace is None:
        raise TargetError(f"Target '{target.text}' has no step {step} to record: it ended after {seen.step}.")
    fill_record(record, seen)
    whole = [role for role, tensor in originals.items() if "[" in role and bool((tensor == tensor.round()).all())]
    trace.meta |= {"precision": precision or record.precision, "step": step, "whole": whole}
    return record, trace


def _keep_islands(record: RunRecord, change: Change) -> Callable[[nn.Module], None]:
    """What makes the islands of a change when their model is first called."""
    kept: list[Islands] = []

    def keep(module: nn.Module) -> None:
        if not change.islands or kept:
            return
        model = record.model if record.model is not None else module
        names = {name for name, _ in model.named_modules()}  # pyright: ignore[reportUnknownVariableType]
        if names.issuperset(change.islands):  # a loop may call several models
            kept.append(Islands(model, change.islands))

    return keep


def _originals(target: Target, seed: int, step: int) -> dict[str, Tensor]:
    """A workload's buffers and the step's batch before they are cast: what they were meant to hold.

    A batch tensor that 16 bits cannot hold at all is left out: its inf is there before the step begins.
    """
    if target.builder is None:
        return {}
    workload = target.build(seed)
    found = {name: b.detach().clone() for name, b in workload.model.named_buffers() if b.is_floating_point()}
    plan = resolve_plan(workload.precision)
    if plan.weights == "fp32":
        return found
    batch = workload.batches[step * plan.accumulate % len(workload.batches)]
    for role, tensor in batch_tensors(batch):
        if tensor.is_floating_point() and bool(tensor.to(DTYPES[plan.compute]).isfinite().all()):
            found[role] = tensor.detach().clone()
    return found


def _new_record(target: Target, precision: Precision | None) -> RunRecord:
    function = target.builder or target.trainer
    code = getattr(function, "__code__", None)
    return RunRecord(
        kind="build" if target.builder else "train",
        entry=getattr(function, "__name__", ""),
        precision=precision or "",
        file=code.co_filename if code else "",
    )


def _run(target: Target, record: RunRecord, seen: Watch, *, steps: int | None, seed: int) -> None:
    if target.builder is not None:
        workload = target.build(seed)
        record.precision = record.precision or workload.plan_name
        record.model, record.num_batches = workload.model, len(workload.batches)
        record.bad_tensors = find_bad_tensors(workload.batches)
        record.exception = _catch(seen, lambda: train_plainly(workload, seen, _STEPS if steps is None else steps))
        return
    trainer = cast("Callable[..., object]", target.trainer)
    arguments = choose_arguments(trainer, target.text, steps=steps, seed=seed)

    def call() -> None:
        record.result = trainer(**arguments)

    record.exception = _catch(seen, call)


def _catch(seen: Watch, run: Callable[[], None]) -> Failure | None:
    try:
        run()
    except SystemExit:
        return None
    except Exception as error:  # the user's own: it is what there is to explain
        return describe_failure(error, seen)
    return None


def choose_arguments(trainer: Callable[..., object], text: str, *, steps: int | None, seed: int) -> dict[str, int]:
    """What a train() function is called with: of steps and seed, what it takes.

    Args:
        trainer: The function.
        text: Its target, for messages.
        steps: None leaves it to the function.
        seed: Of the run.

    Raises:
        TargetError: It needs anything else.
    """
    parameters = inspect.signature(trainer).parameters
    given = {"steps": steps, "seed": seed}
    wanted = {name: value for name, value in given.items() if name in parameters and value is not None}
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in kinds and p.name not in wanted
    ]
    if missing:
        raise TargetError(f"Target '{text}': train needs {', '.join(missing)}. Give its parameters defaults.")
    return wanted


class StepRecording:
    """Records a step from its forward pass on.

    In a loop of the user's it begins where gradients are cleared, the first one where an optimizer is made: what is
    computed before the forward pass, such as features, belongs to the step. What an evaluation in between computes does
    not.

    Args:
        seen: The watch; its hooks of forward passes, clearing and leaving are taken.
        step: Number of the step.
        record: Of the run: its kind, and the model of a workload.
        originals: What buffers and batch held before they were cast.
        on_forward: Called with every root module before it runs.

    Attributes:
        recorder: The recorder; None before the step, and where none came.
    """

    def __init__(
        self,
        seen: Watch,
        step: int,
        record: RunRecord,
        originals: Mapping[str, Tensor],
        *,
        on_forward: Callable[[nn.Module], None],
    ) -> None:
        self.recorder: GradientRecorder | None = None
        self._early = False  # no forward pass has run in it yet
        self._seen, self._step, self._record, self._originals = seen, step, record, originals
        self._on_forward = on_forward
        calls = seen.callbacks
        calls.forward, calls.clear, calls.leave = self._begin, self._begin_early, self._give_up

    def finish(self) -> Trace | None:
        """The run is over: what was recorded; None where the step had no forward pass."""
        if self._record.exception is None:  # else the step ended before its forward pass
            self._give_up()
        if self.recorder is None:
            return None
        self.recorder.__exit__(None, None, None)
        return self.recorder.trace

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._on_forward(module)
        if self._seen.step != self._step or (self.recorder is not None and not self._early):
            return
        model = self._record.model if self._record.model is not None else module
        if self.recorder is None:
            batch = (inputs, self._seen.targets)
            self.recorder = GradientRecorder(model, batch=batch, twins=True, weights=self._originals)
            self.recorder.__enter__()
        else:
            self.recorder.adopt(model)
            self.recorder.name_batch(inputs, self._seen.targets)
        self._early = False

    def note_event(self) -> None:
        """Something happened: the first step begins where an optimizer is made."""
        if not self._seen.step and isinstance(self._seen.events[-1], NewOptimizerEvent):
            self._begin_early()

    def _begin_early(self) -> None:
        if self._seen.step == self._step and self.recorder is None and self._record.kind == "train":
            self.recorder, self._early = GradientRecorder(nn.Module(), twins=True), True  # its model is not known yet
            self.recorder.__enter__()

    def _give_up(self) -> None:
        if self.recorder is not None and self._early:
            self.recorder.__exit__(None, None, None)
            self.recorder, self._early = None, False
