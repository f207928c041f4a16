"""Where a tensor of a trace came from, and how far damage went from an operation."""

from __future__ import annotations

from collections.abc import Iterator

from floatline.diagnosis.detectors.op_kinds import CARRIERS, CASTS, base_name
from floatline.probe.trace.trace import Op, Operand, Trace, Values

# An error against FP32 from which a tensor counts as touched by damage before it.
TOUCHED = 0.01


def ancestors(operand: Operand, trace: Trace, depth: int) -> Iterator[Op]:
    """The operation that made an operand, and those before it, nearest first."""
    if operand.made_by is None or depth == 0:
        return
    op = trace.ops[operand.made_by]
    yield op
    for own in op.inputs:
        yield from ancestors(own, trace, depth - 1)


def maker_of(operand: Operand, trace: Trace) -> Op | None:
    """The operation that made an operand's numbers, through casts and copies."""
    while operand.made_by is not None:
        op = trace.ops[operand.made_by]
        if base_name(op.name) not in CASTS or not op.inputs:
            return op
        operand = op.inputs[0]
    return None


def source_of(operand: Operand, trace: Trace) -> Operand:
    """The operand that holds the same largest number first, through all that only hands it on."""
    while operand.made_by is not None:
        op = trace.ops[operand.made_by]
        if base_name(op.name) not in CARRIERS:
            break
        larger = [own for own in op.inputs if own.value.largest >= operand.value.largest > 0.0]
        if not larger:
            break
        operand = larger[0]
    return operand


def reached_by(birth: Op, trace: Trace) -> set[int]:
    """Indices of the operations that the damage of one got to, itself included.

    Inf that is swallowed leaves an error against FP32, so both count; a mask's -inf that the softmax turns into the
    same 0 as in FP32 ends there.
    """
    touched = {birth.index}
    for op in trace.ops[birth.index + 1 :]:
        if any(own.made_by in touched for own in op.inputs) and any(map(_is_touched, op.outputs)):
            touched.add(op.index)
    return touched


def reaches_gradient(birth: Op, trace: Trace) -> bool:
    """Whether the damage of an operation got into a parameter's gradient."""
    touched = reached_by(birth, trace)
    return any(gradient.made_by in touched and _is_touched(gradient.value) for gradient in trace.gradients.values())


def _is_touched(value: Values) -> bool:
    if value.blown is None or value.error is None:
        return value.dtype.startswith(("float", "bfloat"))  # not known: no twin
    return bool(value.blown) or value.error > TOUCHED


def first_holder(operand: Operand, trace: Trace) -> Op | None:
    """The operation with which an operand's -inf came into the step; None where it came from outside."""
    holder: Op | None = None
    while operand.made_by is not None:
        holder = trace.ops[operand.made_by]
        bearing = [own for own in holder.inputs if own.value.neg_inf]
        if not bearing:
            return holder
        operand = bearing[0]
    return None
