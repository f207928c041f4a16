"""ForwardEvidence: a forward pass in its own precision, in FP32 and in the other 16-bit format, and their traces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from floatline.diagnosis.detectors.operations import base_name
from floatline.diagnosis.evidence import Evidence
from floatline.precision.nested import find_tensors
from floatline.probe.runs.failures import Failure, describe_failure
from floatline.probe.runs.records import RunRecord
from floatline.probe.runs.runs import Precision
from floatline.probe.steps.captured_forward import CapturedForward, cast_all_buffers
from floatline.probe.steps.captured_step import Precision as AnyPrecision
from floatline.probe.steps.replayed import Replay
from floatline.probe.trace.trace import Op, Trace
from floatline.probe.watch.watch import watch
from floatline.workload import Target

# Operations that put numbers in place, and compute none: NaN or inf that they give of finite ones is a constant.
_PLACING = frozenset(
    {
        *("full", "full_like", "new_full", "fill", "masked_fill", "index_fill", "where", "scatter", "index_put"),
        *("constant_pad_nd", "copy", "clone", "scalar_tensor", "lift_fresh", "masked_scatter"),
    }
)


@dataclass(frozen=True)
class ForwardArm:
    """The pass in one precision.

    Args:
        record: What it showed, as of a run of one step.
        replay: What it gave; None where it raised.
    """

    record: RunRecord
    replay: Replay | None

    @property
    def failure(self) -> str:
        """What it raised, in one line; '' where it did not."""
        error = self.record.exception
        return "" if error is None else f"{error.kind}: {next(iter(error.message.splitlines()), '')}"


def run_arm(step: CapturedForward, precision: AnyPrecision | None = None) -> ForwardArm:
    """Run a forward pass in a precision, and note what it raises."""
    record = RunRecord(kind="build", entry="forward", precision=precision or step.plan.name, num_steps=1)
    record.model = step.model
    with watch() as seen:
        try:
            replay = step.replay(precision=precision)
        except Exception as error:  # the user's own: it is what there is to explain
            record.exception = describe_failure(error, seen)
            return ForwardArm(record, None)
    if not replay.finite:
        record.bad_loss = 0
    return ForwardArm(record, replay)


def settle_formats(step: CapturedForward) -> None:
    """Cast FP32 inputs, then buffers that no checkpoint holds, where two formats meet in the pass otherwise.

    All stays as it was where they meet all the same.
    """
    casts, before = step.casts_inputs, step.state.cast_too
    if step.plan.weights == "fp32" or not _meets_two_formats(run_arm(step).record.exception):
        return
    step.casts_inputs = True
    if not casts and not _meets_two_formats(run_arm(step).record.exception):
        return
    cast_all_buffers(step)
    if _meets_two_formats(run_arm(step).record.exception):
        step.casts_inputs, step.state.cast_too = casts, before


def settle_marks(step: CapturedForward) -> None:
    """Take NaN and inf of FP32's outputs as marks, where no operation makes them: they are written from constants."""
    wide = run_arm(step, "fp32").replay
    if wide is None or wide.finite or any(not bool(one.isfinite().all()) for one in _given_numbers(step)):
        return
    trace = step.replay(precision="fp32", trace=True).trace
    step.has_marks = trace is not None and not any(_makes_nonfinite(op) for op in trace.ops)


def _makes_nonfinite(op: Op) -> bool:
    """Whether an operation computes NaN or inf of finite numbers; one that only puts numbers in place cannot."""
    read = any(own.value.nonfinite for own in op.inputs)
    return not read and base_name(op.name) not in _PLACING and any(out.nonfinite for out in op.outputs)


def _given_numbers(step: CapturedForward) -> list[Tensor]:
    given = [*step.state.captured.values(), *step.state.captured_buffers.values(), *find_tensors(step.batches[0])]
    return [tensor for tensor in given if tensor.is_floating_point()]


def _meets_two_formats(failure: Failure | None) -> bool:
    words = "" if failure is None else failure.message
    return "dtype" in words or "expected scalar type" in words or "same type" in words


@dataclass
class ForwardEvidence(Evidence):
    """A forward pass as a run of one step, whose outputs stand for its gradients.

    Args:
        forward: The pass.
    """

    forward: CapturedForward | None = None

    def trace(self, step: int, precision: Precision | None = None) -> Trace | None:
        """The operations of the pass, as far as it came."""
        key = (0, precision)
        if key not in self.traces and self.forward is not None:
            del step
            self.on_progress("recording it" + (f" in {precision.upper()}" if precision else ""))
            try:
                self.traces[key] = self.forward.replay(precision=precision, trace=True).trace
            except Exception:  # it is known what it raises
                self.traces[key] = self.forward.recorded
        return self.traces.get(key)


def make_evidence(step: CapturedForward, given: ForwardArm, fp32: ForwardArm, text: str) -> ForwardEvidence:
    """What detectors are asked of."""
    target = Target(text, None, None, Path())
    return ForwardEvidence(target, 0, given.record, fp32.record, lambda _: None, forward=step)


def other_format(step: CapturedForward) -> AnyPrecision:
    """The 16-bit format that is not asked about."""
    return cast("AnyPrecision", "fp16" if step.plan.compute == "bf16" else "bf16")
