"""run_target and trace_target: a target is run as it is, or in FP32 or BF16, and watched."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from floatline import optim
from floatline.errors import TargetError
from floatline.guard.applied_plan import AppliedPlan
from floatline.guard.islands import Islands, cast_weights
from floatline.plan import Clip, Plan
from floatline.presets import resolve_plan
from floatline.probe.changes import Change, changed
from floatline.probe.failures import Failure, describe_failure
from floatline.probe.records import RunRecord
from floatline.probe.roles import batch_tensors
from floatline.probe.summary import fill_record, find_bad_tensors
from floatline.probe.surroundings import LimitReached, Precision, prepared, time_limit
from floatline.probe.trace import Trace
from floatline.probe.watch import Watch, watch
from floatline.workload import Target, Workload

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_STEPS = 40

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
    until: int | None = None,
    on_step: Callable[[int], None] | None = None,
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
        until: The last step that is of interest: the run ends after it.
        on_step: Called with the number of every step that begins.
        limit: Seconds after which the run counts as endless.

    Returns:
        The record. An exception of the user's loop is in it, not raised.

    Raises:
        TargetError: The target cannot be built, trains no step, needs arguments, or does not end.
    """
    record = _new_record(target, precision)
    tick = _make_tick(on_step, limit)
    began = time.perf_counter()
    change = change or Change()
    keep = _keep_islands(record, change)
    light = precision == "fp32"  # what the loop calls is seen in the run as it is

    def follow() -> None:
        tick(seen.step)
        if until is not None and seen.step > until:
            raise _StepReached

    with prepared(target, precision, seed), changed(change, in_step=lambda: False), watch(light=light) as seen:
        seen.on_forward = lambda module, _: keep(module)
        seen.on_event = follow
        with time_limit(limit):
            try:
                _run(target, record, seen, steps=steps, seed=seed)
            except _StepReached:
                pass
            except LimitReached:
                raise TargetError(
                    f"Target '{target.text}' did not end in {limit:g} seconds ({seen.step} steps). "
                    "Give it fewer steps, or a longer limit."
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
    from floatline.probe.gradient_errors import GradientRecorder

    record = _new_record(target, precision)
    change = change or Change()
    keep = _keep_islands(record, change)
    originals = _originals(target, seed, step)
    recorder: GradientRecorder | None = None
    early = False  # no forward pass has run in it yet

    def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal recorder, early
        keep(module)
        if seen.step != step or (recorder is not None and not early):
            return
        model = record.model if record.model is not None else module
        if recorder is not None and recorder.model is not model:
            give_up()
        if recorder is None:
            recorder = GradientRecorder(model, batch=(inputs, seen.targets), twins=True, weights=originals)
            recorder.__enter__()
        else:
            recorder.name_batch(inputs, seen.targets)
        early = False

    def begin_early() -> None:
        """In a loop of the user's, what comes before the forward pass, such as features, belongs to the step."""
        nonlocal recorder, early
        if seen.step == step and recorder is None and target.builder is None and len(seen.roots) == 1:
            recorder, early = GradientRecorder(next(iter(seen.roots.values())), twins=True), True
            recorder.__enter__()

    def give_up() -> None:
        """What came before belongs to something else, such as an evaluation."""
        nonlocal recorder, early
        if recorder is not None and early:
            recorder.__exit__(None, None, None)
            recorder, early = None, False

    def end_after() -> None:
        if recorder is not None and seen.step > step:
            raise _StepReached

    with (
        prepared(target, precision, seed),
        changed(change, in_step=lambda: seen.step == step),
        watch(light=True) as seen,
    ):
        seen.on_forward, seen.on_event, seen.on_clear, seen.on_leave = begin, end_after, begin_early, give_up
        try:
            with contextlib.suppress(_StepReached):
                _run(target, record, seen, steps=step + 1 if target.builder else steps, seed=seed)
        finally:
            if recorder is not None:
                recorder.__exit__(None, None, None)
    if recorder is None or early:
        raise TargetError(f"Target '{target.text}' has no step {step} to record: it ended after {seen.step}.")
    fill_record(record, seen)
    whole = [role for role, tensor in originals.items() if "[" in role and bool((tensor == tensor.round()).all())]
    recorder.trace.meta |= {"precision": precision or record.precision, "step": step, "whole": whole}
    return record, recorder.trace


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
        if tensor.is_floating_point() and bool(tensor.to(_DTYPES[plan.compute]).isfinite().all()):
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


def _make_tick(on_step: Callable[[int], None] | None, limit: float) -> Callable[[int], None]:
    last, end = -1, time.monotonic() + limit

    def tick(step: int) -> None:
        nonlocal last
        if time.monotonic() > end:
            raise LimitReached
        if step != last and on_step is not None:
            on_step(step)
        last = step

    return tick


def _run(target: Target, record: RunRecord, seen: Watch, *, steps: int | None, seed: int) -> None:
    if target.builder is not None:
        workload = target.build(seed)
        record.precision = record.precision or workload.plan_name
        record.model, record.num_batches = workload.model, len(workload.batches)
        record.bad_tensors = find_bad_tensors(workload.batches)
        record.exception = _catch(seen, lambda: _train(workload, seen, _STEPS if steps is None else steps))
        return
    trainer = cast("Callable[..., object]", target.trainer)
    arguments = _arguments(trainer, target.text, steps=steps, seed=seed)

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


def _arguments(trainer: Callable[..., object], text: str, *, steps: int | None, seed: int) -> dict[str, int]:
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


def _train(workload: Workload, seen: Watch, steps: int) -> None:
    """The plain loop over a workload's batches."""
    plan = resolve_plan(workload.precision)
    model = workload.model
    whole = plan.weights != "fp32"  # weights and batches in 16 bits, no autocast
    if whole and plan.fp32_modules:
        cast_weights(model, plan)
    elif whole:
        model.to(_DTYPES[plan.compute])
    optimizer = workload.make_optimizer(model)
    if whole and plan.update is not None:
        optimizer = optim.convert(optimizer, update=plan.update)
    applied = AppliedPlan(model, plan, loss_fn=workload.loss_fn)
    try:
        _train_steps(replace(workload, loss_fn=applied.loss_fn or workload.loss_fn), plan, optimizer, seen, steps)
    finally:
        applied.remove()


def _train_steps(workload: Workload, plan: Plan, optimizer: Optimizer, seen: Watch, steps: int) -> None:
    model, dtype, whole = workload.model, _DTYPES[plan.compute], plan.weights != "fp32"
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
