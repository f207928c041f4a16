"""Operands that 16 bits rounded onto a singular point: exactly 0 or 1, below 0, or a guard that is 0."""

from __future__ import annotations

from floatline.diagnosis.detectors.op_kinds import ADDITIONS, AT_ONE, AT_ZERO, base_name
from floatline.diagnosis.detectors.provenance import ancestors
from floatline.formats import find_format
from floatline.probe.trace.trace import Op, Operand, Trace

FORMATS = {"float16": "fp16", "bfloat16": "bf16"}
# A difference that differs from its FP32 twin by more than this is damaged.
HARM = 0.05


def find_pole(op: Op, trace: Trace) -> tuple[str, str] | None:
    """Cause and numbers, where an operand was rounded onto a point at which the operation is singular."""
    name = base_name(op.name)
    for place, operand in enumerate(op.inputs):
        value = operand.value
        if name in {"div", "xlogy"} and place == 0 and len(op.inputs) > 1:
            continue  # the numerator
        if value.lost and is_singular_at_zero(op):
            guard = _lost_guard(operand, trace)
            if guard is not None:
                seen = f"{value.lost:,} operands of {name} are 0: the guard {guard[0]:g} rounds to 0 in {guard[1]}"
                return "eps-underflow", seen
            return "rounded-onto-singularity", (
                f"{value.lost:,} operands of {name} are exactly 0 in {_narrowest(operand, trace)} and not in FP32"
            )
        top = value.twin_largest
        if name in AT_ONE and top is not None and value.largest >= 1.0 > top:
            return "rounded-onto-singularity", (
                f"an operand of {name} is exactly 1 in {_narrowest(operand, trace)} and {top:.9g} in FP32"
            )
    return None


def is_singular_at_zero(op: Op) -> bool:
    """Whether the operation or its slope is infinite at 0: a power is from an exponent below 1 on."""
    name = base_name(op.name)
    if name != "pow" or len(op.inputs) > 1:
        return name in AT_ZERO
    return any(exponent < 1.0 for exponent in op.scalars)


def cancelled_before(op: Op, trace: Trace) -> tuple[Op, str] | None:
    """The difference that went below zero, where only a root or a logarithm of it shows the damage."""
    if not any(out.nan for out in op.outputs) or any(operand.value.lost for operand in op.inputs):
        return None
    for operand in op.inputs:
        for maker in ancestors(operand, trace, 3):
            if base_name(maker.name) in ADDITIONS and maker.outputs and (maker.outputs[0].error or 0.0) > HARM:
                out = maker.outputs[0]
                return maker, f"a difference of {out.twin_largest:.3g} is off by {out.error:.0%}, and below 0"
    return None


def _narrowest(operand: Operand, trace: Trace) -> str:
    """The 16-bit dtype that an operand has, or had before autocast widened it."""
    made = (out.dtype for op in ancestors(operand, trace, 4) for out in op.outputs)
    return next((dtype for dtype in (operand.value.dtype, *made) if dtype in FORMATS), operand.value.dtype)


def _lost_guard(operand: Operand, trace: Trace, depth: int = 4) -> tuple[float, str] | None:
    """A constant that was added to keep an operand from zero, and the dtype in which it is zero itself; else None."""
    for op in ancestors(operand, trace, depth):
        if base_name(op.name) not in ADDITIONS | {"clamp", "clamp_min", "maximum"}:
            continue
        dtype = op.outputs[0].dtype if op.outputs else ""
        if dtype not in FORMATS:
            continue
        zero_at = find_format(FORMATS[dtype]).zero_at
        for scalar in op.scalars:
            if 0 < abs(scalar) <= zero_at:
                return scalar, dtype
        for other in op.inputs:
            # A constant tensor that became zero in the cast, or that the sum turns into zero.
            if other.value.numel == 1 and (other.value.lost or 0 < other.value.largest <= zero_at):
                return other.value.twin_largest or 0.0, dtype
    return None
