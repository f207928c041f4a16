"""find_exceptions: the cause behind the exception that ended a run, where its message and place tell."""

from __future__ import annotations

import linecache
import re
from dataclasses import replace

from floatline.causes import Cause, find_cause, find_named_causes, find_symptom
from floatline.diagnosis.detectors.first_nonfinite import Birth, describe_birth
from floatline.diagnosis.detectors.loop import describe_half_parameters, find_collective, shared_prefix
from floatline.diagnosis.detectors.operations import FORMATS, ancestors
from floatline.diagnosis.detectors.silent import colliding_casts
from floatline.diagnosis.evidence import Evidence
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.probe.runs.failures import Failure
from floatline.probe.runs.records import RunRecord
from floatline.probe.trace.trace import Op
from floatline.probe.watch.events import BackwardEvent, ClearEvent, ScalerStepEvent

_TWO_DTYPES = "dtype-mismatch"
# A 16-bit format in the words of a message.
_SIXTEEN = re.compile(r"\b(?:b?float16|b?fp16|bf16|half|halftensor|bfloat16tensor)\b", re.IGNORECASE)


def find_exceptions(given: RunRecord, fp32: RunRecord | None) -> list[Finding]:
    """The finding that explains the exception of a run; nothing where its message does not tell.

    Args:
        given: The run as it is.
        fp32: The same run in FP32. Where it raises the same, the cause is not one of precision.
    """
    failure = given.exception
    if failure is None:
        return []
    cause = _name_cause(given, failure)
    if cause is None:
        return _find_refusal(failure) if fp32 is not None and fp32.exception is None else []
    same = fp32 is not None and fp32.exception is not None and fp32.exception.message == failure.message
    if same and cause.family != "not-precision":
        return []
    if cause.id == "fp16-params-with-scaler":
        return [describe_half_parameters(given)]
    if cause.id == "params-not-trained":
        return [_describe_unused(given, failure) if _find_indices(failure) else _describe_idle(given, failure)]
    if cause.id == "distributed-desync":
        return [_describe_desync(given, failure)]
    if cause.id == "scaler-misuse":
        return [_describe_misuse(given, failure)]
    return [_describe(cause, failure)]


def _name_cause(given: RunRecord, failure: Failure) -> Cause | None:
    text = f"{failure.kind}: {failure.message}"
    named = find_named_causes(text)
    if named:
        cause = named[0]
        if cause.id == "params-not-trained" and _cleared_before_step(given):
            return find_cause("scaler-misuse")
        return cause
    symptom = find_symptom(text)
    if symptom is not None and _find_indices(failure):
        return find_cause("params-not-trained")
    if symptom is None or symptom.causes[0] != _TWO_DTYPES:
        return None  # a NaN that some check met: its operation tells, not this message
    return find_cause("autocast-region-misuse" if failure.in_disabled_region else _TWO_DTYPES)


def _find_refusal(failure: Failure) -> list[Finding]:
    """The finding about code that refuses 16 bits itself: its message names the format, and FP32 does not raise."""
    if not _SIXTEEN.search(failure.message):
        return []
    fix = "Give this call FP32 tensors, and cast back what it gives: its own code refuses 16 bits."
    return [replace(_describe(find_cause("unsupported-half-op"), failure), fix=fix)]


def _cleared_before_step(given: RunRecord) -> bool:
    """Whether gradients were there and were cleared before the scaler's step."""
    attempts = given.of(ScalerStepEvent)
    if not attempts:
        return False
    for event in reversed(given.events[: given.events.index(attempts[-1])]):
        if isinstance(event, BackwardEvent):
            return False
        if isinstance(event, ClearEvent):
            before = given.events[: given.events.index(event)]
            return any(isinstance(e, BackwardEvent) and e.step >= event.step - 1 for e in before)
    return False


def _describe(cause: Cause, failure: Failure) -> Finding:
    fix = cause.advice
    if cause.id == _TWO_DTYPES and failure.in_backward:
        fix = "Put torch.amp.custom_fwd above forward and torch.amp.custom_bwd above backward of this function."
    module = failure.module if failure.in_module else failure.function if failure.in_backward else ""
    code = linecache.getline(failure.file, failure.line).strip() if failure.file else ""
    seen = f"{failure.kind}: {_first_line(failure.message)}" + (f", at `{code}`" if code else "")
    return Finding(cause, seen, fix, module, failure.file, failure.line, _name_op(failure))


def _name_op(failure: Failure) -> str:
    found = re.match(r"(linalg\.\w+): ", failure.message)
    if found:
        return f"torch.{found[1]}"
    if failure.op:
        return failure.op
    kernel = re.search(r'"(\w+?)(?:_cpu|_cuda|_out)*" not implemented', failure.message)
    return f"aten.{kernel[1]}" if kernel else ""


def _describe_idle(given: RunRecord, failure: Failure) -> Finding:
    attempts = [e for e in given.of(ScalerStepEvent) if not e.num_gradients]
    numbers = {e.optimizer for e in attempts[-1:]}
    optimizer = next((o for o in given.optimizers if o.number in numbers), None)
    name = shared_prefix(optimizer.names) if optimizer else ""
    what = f"all {len(optimizer.names)} parameters of {optimizer.name} have no gradient" if optimizer else "no gradient"
    return Finding(
        find_cause("params-not-trained"),
        f"{failure.kind}: {_first_line(failure.message)}: {what}",
        f"Let the loss reach {name or 'them'}, without detach, or step only optimizers that have gradients.",
        name,
        failure.file,
        failure.line,
        "torch.amp.GradScaler.step" if attempts else "",
    )


def _find_indices(failure: Failure) -> str:
    """Which parameters DistributedDataParallel waited for in vain, such as '8 9'; '' for any other failure."""
    found = re.search(r"did not receive grad for rank \d+: (\d[\d ]*)", failure.message)
    return found[1].strip() if found else ""


def _describe_unused(given: RunRecord, failure: Failure) -> Finding:
    names = [name.removeprefix("module.") for name in given.no_gradient if name]
    listed = ", ".join(names[:3]) if names else f"parameters {_find_indices(failure)}"
    return Finding(
        find_cause("params-not-trained"),
        f"DistributedDataParallel waited for the gradients of {listed}, which the loss does not reach on this rank",
        "Let the loss reach them on every rank, take them out of the model, or give DistributedDataParallel "
        "find_unused_parameters=True.",
        shared_prefix(names),
        failure.file,
        failure.line,
        "torch.nn.parallel.DistributedDataParallel",
    )


def _describe_misuse(given: RunRecord, failure: Failure) -> Finding:
    cause = find_cause("scaler-misuse")
    file, line, fix = failure.file, failure.line, cause.advice
    calls = re.findall(r"\b(unscale_|step|update)\b", failure.message)
    op = f"torch.amp.GradScaler.{calls[0]}" if calls else "torch.amp.GradScaler"
    if "No inf checks were recorded for this optimizer" in failure.message:
        cleared = given.of(ClearEvent)[-1]
        file, line, op = cleared.file, cleared.line, "torch.optim.Optimizer.zero_grad"
        fix = "Clear the gradients after the scaler's step, not between the backward pass and the step."
    elif "No inf checks were recorded prior to update" in failure.message:
        fix = (
            "Leave this batch to scaler.step, which checks the gradients and leaves a bad step out by itself; or go on "
            "(continue) without update: only unscale_ and step record what it reads."
        )
    elif "unscale_() has already" in failure.message:
        fix = "Call unscale_ once a step, after the last micro-batch, and update the scaler after each step."
    elif "step() has already" in failure.message:
        fix = "Update the scaler once after each of its steps."
    seen = f"{failure.kind}: {_first_line(failure.message)}"
    return Finding(cause, seen, fix, given.entry, file, line, op)


def _describe_desync(given: RunRecord, failure: Failure) -> Finding:
    file = failure.file or given.file
    name, line = find_collective(file)
    cause = find_cause("distributed-desync")
    return Finding(
        cause,
        f"{failure.kind}: {_first_line(failure.message)}; a collective that waits has no partner on another rank",
        cause.advice,
        given.entry,
        file,
        line or failure.line,
        f"torch.distributed.{name}" if name else "",
    )


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


# Operations between a cast and the index that is made of it: hardly more.
_FAR = 8


def describe_collision(op: Op, largest: float) -> Finding:
    """The finding about an operation that turns whole numbers into 16 bits.

    Args:
        op: The operation.
        largest: The largest of the numbers.
    """
    dtype = op.outputs[0].dtype
    exact = find_format(FORMATS[dtype]).max_exact_integer
    seen = f"numbers up to {largest:g} become {dtype}, which holds whole numbers up to {exact:g} only"
    return describe_birth(Birth(op, "integer-not-exact", seen))


def find_wrong_indices(evidence: Evidence) -> list[Finding]:
    """Why an operation refuses an index that FP32 does not give it: it came through 16 bits."""
    failure = evidence.given.exception
    if failure is None or evidence.fp32.exception is not None:
        return []
    trace = evidence.trace(failure.step)
    raised = None if trace is None else trace.meta.get("exception")
    if trace is None or raised is None:
        return []
    number: int = raised["op"]
    inputs = trace.ops[number].inputs
    indices = [operand for operand in inputs if operand.value.dtype.startswith(("int", "uint"))]
    makers = {maker.index for operand in indices for maker in ancestors(operand, trace, _FAR)}
    for op, largest in colliding_casts(trace):
        if op.index in makers:
            evidence.found_in = trace
            found, message = describe_collision(op, largest), failure.message.partition("\n")[0]
            seen = f"{failure.kind}: {message}, which FP32 does not raise; {found.seen}"
            return [replace(found, seen=seen, fix="Keep this index in integers, or take it through FP32.")]
    return []
