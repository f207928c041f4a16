"""Where inf and NaN are born in a 16-bit step, and of what: pure functions from a trace to causes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from floatline.causes import find_cause
from floatline.diagnosis.detectors.operations import (
    ADDITIONS,
    CASTS,
    ENDS,
    EXPONENTIALS,
    FILLS,
    FORMATS,
    HARM,
    MATMULS,
    POLES,
    PRODUCTS,
    SUMS,
    base_name,
    cancelled_before,
    find_pole,
    maker_of,
    reached_by,
    reaches_gradient,
    source_of,
)
from floatline.findings import Finding, RoundedAt
from floatline.formats import find_format
from floatline.precision.user_frames import is_installed
from floatline.probe.trace.trace import Op, Operand, Trace, Values

# A loss that is off by this share of its size lacks something; rounding alone does less.
DAMAGED = 0.1


@dataclass(frozen=True)
class Birth:
    """One operation that made non-finite numbers of finite ones, where FP32 makes finite ones.

    Args:
        op: The operation to blame: the one that is named, not the cast behind it.
        cause: Id of the cause.
        seen: The numbers.
        at: The operation that showed it; None where it is the same.
        rounded: The operation that rounded what this one fails of, where that is known.
    """

    op: Op
    cause: str
    seen: str
    at: Op | None = None
    rounded: Op | None = None


def describe_birth(birth: Birth, *, module: str | None = None, op: str = "") -> Finding:
    """A birth as a finding; another module or operation than its own may be named."""
    cause = find_cause(birth.cause)
    named = op or (birth.op.node if birth.op.phase == "backward" and birth.op.node else birth.op.name)
    origin = _find_origin(birth)
    return Finding(
        cause,
        seen=birth.seen if origin is None else f"{birth.seen}: {_say_origin(origin, birth.op)}",
        fix=cause.advice,
        module=birth.op.module if module is None else module,
        file=birth.op.file,
        line=birth.op.line,
        op=named,
        origin=origin,
    )


def _find_origin(birth: Birth) -> RoundedAt | None:
    """The line that rounded, where it is one of the user's and another one than the birth's."""
    op = birth.rounded
    if op is None or not op.line or is_installed(op.file) or (op.file, op.line) == (birth.op.file, birth.op.line):
        return None
    return RoundedAt(op.file, op.line, op.name)


def _say_origin(origin: RoundedAt, failing: Op) -> str:
    place = f"line {origin.line}" if origin.file == failing.file else f"{Path(origin.file).name}:{origin.line}"
    return f"{base_name(origin.op)} rounds them in {place}"


def find_births(trace: Trace, *, phases: tuple[str, ...] = ("forward", "outside", "backward")) -> list[Birth]:
    """Every birth in the order of execution."""
    return [_classify(op, trace) for op in trace.ops if op.phase in phases and is_birth(op)]


def is_birth(op: Op) -> bool:
    """Whether the operation makes inf or NaN that FP32 does not, of operands that have none of these."""
    if not any(out.blown for out in op.outputs):
        return False
    return not any(operand.value.blown for operand in op.inputs)


def keep_harmful(births: list[Birth], trace: Trace) -> list[Birth]:
    """The births that got into a gradient; all of them where none did, and nothing where no harm was done."""
    if not births or not (is_harmful(trace) or loss_is_blown(trace)):
        return []
    return [birth for birth in births if reaches_gradient(birth.at or birth.op, trace)] or births


def is_harmful(trace: Trace) -> bool:
    """Whether what was damaged in the step reached a gradient."""
    return any(
        g.blown or g.nonfinite or (g.error is not None and g.error > HARM)
        for g in (operand.value for operand in trace.gradients.values())
    )


def loss_is_blown(trace: Trace) -> bool:
    """Whether the last thing that the forward pass made is not finite where FP32's is."""
    last = last_of_forward(trace)
    return last is not None and any(out.blown for out in last.outputs)


def damages_loss(birth: Birth, trace: Trace) -> bool:
    """Whether inf of the forward pass was swallowed, and left a loss that is not that of FP32.

    Of the same weights and batch, and before the loss scale comes in: no search for one fixes it.
    """
    last = last_of_forward(trace)
    if last is None or birth.op.phase != "forward" or last.outputs[0].numel != 1:
        return False
    return (last.outputs[0].error or 0.0) > DAMAGED and last.index in reached_by(birth.at or birth.op, trace)


def measure_step_errors(traces: Iterable[Trace]) -> tuple[dict[int, float], float]:
    """Of recorded steps: the error of each loss, by step, and the largest of all gradients; inf where not known."""
    losses: dict[int, float] = {}
    gradients = 0.0
    for trace in traces:
        last = last_of_forward(trace)
        if last is not None and last.outputs and last.outputs[0].error is not None and "step" in trace.meta:
            losses[int(trace.meta["step"])] = last.outputs[0].error
        error = trace.meta.get("gradients", {}).get("error")
        gradients = max(gradients, math.inf if error is None else error)
    return losses, gradients


def last_of_forward(trace: Trace) -> Op | None:
    """The operation that made the loss, multiplied by its scale where it has one; None where none was recorded."""
    seeds = (op for op, after in pairwise(trace.ops) if base_name(op.name) == "ones_like" and after.phase == "backward")
    # Each backward pass begins with ones like its loss. What was computed between both, such as a metric, is no loss.
    losses = [op.inputs[0].made_by for op in seeds if op.phase == "forward" and op.inputs]
    if losses and losses[-1] is not None:
        return trace.ops[losses[-1]]
    made = [op for op in trace.ops if op.phase == "forward" and op.outputs and base_name(op.name) != "ones_like"]
    return made[-1] if made else None


def find_unfit_constants(trace: Trace) -> list[Birth]:
    """Tensors that were inf before the step, by a cast that the step does not show: data, buffers and constants.

    Only for a step that fails without a birth, where FP32 does not: inf that was meant does no harm there.
    """
    found: list[Birth] = []
    for op in trace.ops:
        if op.phase != "forward" or not any(out.nonfinite for out in op.outputs):
            continue
        for operand in op.inputs:
            cause = _name_unfit(operand)
            if cause:
                value = operand.value
                what = operand.role or "a constant"
                seen = f"{what} holds {value.nonfinite:,} inf: {value.dtype} ends at {_limit(value.dtype):g}"
                found.append(Birth(op, cause, seen))
    return found


def _name_unfit(operand: Operand) -> str:
    value = operand.value
    if operand.made_by is not None or value.dtype not in FORMATS or value.nan or not value.nonfinite:
        return ""
    if operand.role.startswith(("inputs", "targets")):
        return "input-out-of-range"
    # A mask has one number beside 0; a table of data has more.
    is_mask = value.zeros + value.nonfinite == value.numel
    if operand.role.startswith("buffer"):
        return "scalar-out-of-range" if is_mask else "input-out-of-range"
    return "scalar-out-of-range" if is_mask and not operand.role else ""


def _classify(op: Op, trace: Trace) -> Birth:
    name = base_name(op.name)
    out = max(op.outputs, key=lambda value: value.blown or 0)
    if op.phase == "backward":
        return _classify_backward(op, trace, out)
    if name in CASTS:
        return _classify_cast(op, trace, out)
    limit = _limit(out.dtype)
    constant = _constant_put_in(op, limit)
    if constant:
        return Birth(op, "scalar-out-of-range", f"{constant} is beyond {out.dtype}'s {limit:g}")
    if name in ADDITIONS and _has_saturated(op, limit):
        seen = f"a mask of {-limit:g} and another number add up to -inf in {out.dtype}"
        return Birth(op, "scalar-out-of-range", seen)
    if name in POLES | ENDS:
        pole = find_pole(op, trace)
        if pole is not None:
            return Birth(op, pole.cause, pole.seen, rounded=pole.rounded)
        below = cancelled_before(op, trace)
        if below is not None:
            return Birth(below[0], "cancellation", below[1], op)
    cause = _cause_of_size(op)
    return Birth(op, cause, _describe_size(op, out, limit))


def _constant_put_in(op: Op, limit: float) -> str:
    """The number that an operation fills a tensor with, or adds, beyond a limit, in words; '' where it does not."""
    name, wide = base_name(op.name), _widest_constant(op)
    # A factor is held in FP32, and what it makes is too large; only of a mask it is what is put in.
    factor = name in PRODUCTS and wide > limit and _is_mask(op)
    if name in FILLS or factor or (name in ADDITIONS and wide > limit):
        return f"the constant {wide:g}" if wide > limit else "a constant"
    return ""


def _is_mask(op: Op) -> bool:
    """Whether what is read has one number beside 0."""
    read = [operand.value for operand in op.inputs if operand.value.numel > 1]
    return all(value.largest == value.smallest or value.largest == 0.0 for value in read)


def _classify_cast(op: Op, trace: Trace, out: Values) -> Birth:
    """A cast that overflows is innocent, unless its source is data: whoever made the source is not.

    A sum that was made in FP32 is innocent as well: what autocast takes in 16 bits behind it is not.
    """
    source = source_of(op.inputs[0], trace)
    limit = _limit(out.dtype)
    maker = maker_of(source, trace)
    if maker is not None and not source.role.startswith(("inputs", "targets")):
        reader = _product_of(op, trace)
        if _cause_of_size(maker) == "reduction-overflow" and maker.outputs[0].dtype not in FORMATS and reader:
            taken = f"{base_name(reader.name)} takes {out.twin_largest or 0.0:.4g}, an FP32 sum, in {out.dtype}"
            seen = f"{taken}, which ends at {limit:g}: {out.blown:,} elements are not finite"
            return Birth(reader, "activation-overflow", seen, op)
        constant = _constant_put_in(maker, limit)
        if constant:
            return Birth(maker, "scalar-out-of-range", f"{constant} is beyond {out.dtype}'s {limit:g}", op)
        return Birth(maker, _cause_of_size(maker), _describe_size(maker, out, limit), op)
    seen = f"{source.role or 'a tensor'} holds {source.value.largest:.4g}, and {out.dtype} ends at {limit:g}"
    return Birth(op, "activation-overflow" if source.role.startswith("param") else "input-out-of-range", seen)


def _product_of(cast: Op, trace: Trace) -> Op | None:
    """The matrix product that reads what was cast, which autocast cast it for; None where another operation does."""
    readers = (op for op in trace.ops[cast.index + 1 :] if any(own.made_by == cast.index for own in op.inputs))
    reader = next(readers, None)
    return reader if reader is not None and base_name(reader.name) in MATMULS else None


def _classify_backward(op: Op, trace: Trace, out: Values) -> Birth:
    forward = None if op.forward is None else trace.ops[op.forward]
    if forward is not None:
        pole = find_pole(forward, trace)
        if pole is not None:
            return Birth(op, pole.cause, pole.seen, rounded=pole.rounded)
    size = f"its FP32 value is {out.twin_largest:.4g}, and {out.dtype} ends at {_limit(out.dtype):g}"
    if out.dtype not in FORMATS and (out.twin_largest or 0.0) < _limit(out.dtype):
        size = (
            f"its FP32 value is {out.twin_largest:.4g}, and no recorded operation made them so. What processes "
            "exchange is not recorded, such as gradients that are compressed to 16 bits"
        )
    return Birth(op, "gradient-overflow", f"{out.blown:,} elements of {op.node or op.name} are not finite; {size}")


def is_search(birth: Birth, scale: float) -> bool:
    """Whether a gradient overflowed by its scale alone: at a scale of 1 it would not, so that a search fixes it."""
    if birth.cause != "gradient-overflow":
        return False
    tops = [out.twin_largest / scale < _limit(out.dtype) for out in birth.op.outputs if out.blown and out.twin_largest]
    return all(tops)


def _cause_of_size(op: Op) -> str:
    """What made a number too large, by the operation that made it."""
    name = base_name(op.name)
    if name in EXPONENTIALS or _is_power_of_constant(op):
        return "exp-overflow"
    if name in SUMS or (name in MATMULS and any(_is_constant(operand.value) for operand in op.inputs)):
        return "reduction-overflow"
    if name in PRODUCTS or name in POLES:
        return "product-overflow"
    return "activation-overflow"


def _is_power_of_constant(op: Op) -> bool:
    """Whether it is 2 ** x, not x ** 2: both are 'pow' with one tensor and one number, told by what came out."""
    if base_name(op.name) != "pow" or len(op.inputs) != 1 or not op.scalars or not op.outputs:
        return False
    constant, size, top = op.scalars[0], op.inputs[0].value.largest, op.outputs[0].twin_largest
    if constant <= 1.0 or size <= 0.0 or not top:
        return False
    made = math.log(top)
    return abs(made - size * math.log(constant)) < abs(made - constant * math.log(size))


def _describe_size(op: Op, out: Values, limit: float) -> str:
    sizes = [operand.value.largest for operand in op.inputs if operand.value.dtype.startswith(("float", "bfloat"))]
    of = f" of operands up to {max(sizes):.4g}" if sizes else ""
    top = out.twin_largest if out.twin_largest is not None else math.nan
    made = f"{base_name(op.name)} makes {top:.4g}{of} in FP32"
    return f"{made}; {out.dtype} ends at {limit:g}, so {out.blown:,} elements are not finite"


def _is_constant(value: Values) -> bool:
    """Whether a tensor holds nothing but zeros and ones: a matrix product with it is a sum."""
    return value.largest == 1.0 and value.smallest == 1.0 and value.numel > 1


def _widest_constant(op: Op) -> float:
    """The largest finite number among an operation's constants: Python's, and tensors of one element from outside."""
    tensors = [o.value.largest for o in op.inputs if o.value.numel == 1 and o.made_by is None and not o.role]
    return max([abs(scalar) for scalar in op.scalars if math.isfinite(scalar)] + tensors, default=0.0)


def _has_saturated(op: Op, limit: float) -> bool:
    """Whether an operand holds the format's lowest number: a mask that was filled with finfo.min."""
    return any(0.99 * limit <= operand.value.largest <= limit and _from_fill(operand) for operand in op.inputs)


def _from_fill(operand: Operand) -> bool:
    # A mask has few different numbers: its largest magnitude, zeros, and nothing in between is likely; data has more.
    value = operand.value
    return value.smallest >= 0.5 * value.largest or value.zeros > 0


def _limit(dtype: str) -> float:
    return find_format(FORMATS.get(dtype, "fp32")).max
