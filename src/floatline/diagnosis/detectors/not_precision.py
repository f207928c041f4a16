"""Failures that FP32 has, too: pure functions from an FP32 trace of the failing step to a cause."""

from __future__ import annotations

import math

from floatline.diagnosis.detectors.first_nonfinite import Birth, last_of_forward
from floatline.diagnosis.detectors.operations import (
    ADDITIONS,
    AT_ONE,
    COUNTS,
    FILLS,
    NORMS,
    POLES,
    SPREADS,
    SUMS,
    ancestors,
    base_name,
    first_holder,
    is_singular_at_zero,
    maker_of,
)
from floatline.probe.trace.trace import Op, Operand, Trace, Values

# No model in training holds this.
HUGE = 1e15


def first_birth_in_fp32(trace: Trace) -> Birth | None:
    """The first operation that makes inf or NaN of finite operands in FP32, and what that means."""
    found, is_certain = _find_birth(trace)
    return found if is_certain else _find_zero_product(trace) or found


def _find_birth(trace: Trace) -> tuple[Birth | None, bool]:
    """The first birth, and whether it is to blame even where all that it made is multiplied by 0 later."""
    at_pole: Birth | None = None
    for op in trace.ops:
        if op.phase in {"outside", "update"} or not any(out.nonfinite for out in op.outputs) or _is_fill(op):
            continue
        bad = next((o for o in op.inputs if o.role.startswith(("inputs", "targets")) and _is_bad(o.value)), None)
        if bad is not None:
            num_inf = bad.value.pos_inf + bad.value.neg_inf
            return Birth(op, "bad-input-data", f"{bad.role} holds {bad.value.nan:,} NaN and {num_inf:,} inf"), False
        sick = [o for o in op.inputs if o.value.nan or o.value.pos_inf]
        if any(o.made_by is not None or o.role or op.phase == "backward" for o in sick):
            continue  # handed on, or left over from a backward pass before
        found = _classify(op, trace)
        if found is not None:
            return found, at_pole is None or (op.phase == "backward" and not _is_in_loss(trace))
        at_pole = at_pole or _meets_pole(op)
    return at_pole, False


def _find_zero_product(trace: Trace) -> Birth | None:
    """The first product with 0 that all NaN and inf of the loss come through, or of the gradients where it is finite.

    None where some of them get there by another way, or where what is not finite outgrew FP32.
    """
    zeroed: dict[str, list[int]] = trace.meta.get("zeroed", {})
    if not zeroed or any(_is_outgrown(op) for op in trace.ops):
        return None
    last = last_of_forward(trace)
    ends = [last] if last is not None and _is_in_loss(trace) else _makers_of_bad_gradients(trace)
    waiting, seen, found = ends, {op.index for op in ends}, list[Op]()
    while waiting:
        op = waiting.pop()
        if _leaves_out_nothing(op, zeroed.get(str(op.index))):
            found.append(op)
            continue
        bad = [operand for operand in op.inputs if operand.value.nonfinite]
        if not bad or any(operand.made_by is None for operand in bad):
            return None
        new = {operand.made_by for operand in bad if operand.made_by is not None} - seen
        seen |= new
        waiting += [trace.ops[index] for index in new]
    if not found:
        return None
    op = min(found, key=lambda one: one.index)
    num = zeroed[str(op.index)][0]
    what = "places that it sums over" if base_name(op.name) != "mul" else "factors"
    seen_there = f"{num:,} {what} of {base_name(op.name)} are NaN or inf and meet an exact 0, and 0 × NaN is NaN"
    return Birth(op, "nan-times-zero", seen_there)


def _is_in_loss(trace: Trace) -> bool:
    last = last_of_forward(trace)
    return last is not None and any(out.nonfinite for out in last.outputs)


def _makers_of_bad_gradients(trace: Trace) -> list[Op]:
    makers = {o.made_by for o in trace.gradients.values() if o.value.nonfinite and o.made_by is not None}
    return [trace.ops[index] for index in makers]


def _leaves_out_nothing(op: Op, counts: list[int] | None) -> bool:
    """Whether all that is not finite in a product meets a 0; of a number of the code, such as -inf, whether some do."""
    if counts is None:
        return False
    num_met, num_bad = counts
    by_constant = any(o.value.numel == 1 and o.value.nonfinite and o.made_by is None and not o.role for o in op.inputs)
    return num_met == num_bad or (by_constant and num_met > 0)


def _is_outgrown(op: Op) -> bool:
    """Whether an operation that is no pole makes inf of finite numbers: numbers that are too large for FP32."""
    made = any(out.nonfinite for out in op.outputs) and not any(operand.value.nonfinite for operand in op.inputs)
    return made and not _is_fill(op) and not is_singular_at_zero(op) and any(o.value.largest > HUGE for o in op.inputs)


def _is_bad(value: Values) -> bool:
    """Whether data is not finite; 0 and -inf alone are a mask, and meant."""
    return bool(value.nonfinite) and value.zeros + value.neg_inf < value.numel


def _is_fill(op: Op) -> bool:
    """-inf on purpose: a fill, or what only hands it on."""
    name = base_name(op.name)
    only_negative = all(not out.nan and not out.pos_inf for out in op.outputs)
    return only_negative and name in {
        "masked_fill",
        "full",
        "fill",
        "where",
        "full_like",
        "scalar_tensor",
        "add",
        "triu",
    }


def _classify(op: Op, trace: Trace) -> Birth | None:
    name = base_name(op.name)
    if _is_masked_out(op, trace):
        return Birth(op, "fully-masked-softmax", "a row of the softmax is -inf everywhere, so it is 0 / 0")
    if any(operand.value.numel == 0 for operand in op.inputs) and name in SUMS | POLES | {"max", "min"}:
        return Birth(op, "empty-reduction", f"{name} over a tensor without elements")
    if name in {"nll_loss_forward", "nll_loss2d_forward"} and len(op.outputs) > 1 and op.outputs[1].zeros:
        return Birth(op, "empty-reduction", "no target counts: the mean over 0 of them is 0 / 0")
    if name in SPREADS and op.inputs and op.inputs[0].value.numel == op.outputs[0].numel:
        return Birth(op, "empty-reduction", f"{name} of one element divides by 0")
    if name == "div" and len(op.inputs) > 1 and op.inputs[1].value.zeros:
        maker = maker_of(op.inputs[1], trace)
        if maker is not None and base_name(maker.name) in COUNTS:
            seen = f"{op.inputs[1].value.zeros:,} of the counts that are divided by are 0"
            return Birth(op, "empty-reduction", seen)
    if op.phase == "backward" and op.forward is not None:
        return _singular_slope(op, trace.ops[op.forward])
    return None


def _is_masked_out(op: Op, trace: Trace) -> bool:
    """Whether a softmax, fused or written out, has nothing left: -inf that was put there on purpose."""
    name = base_name(op.name)
    inputs = op.inputs
    if op.phase == "backward":
        forward = None if op.forward is None else trace.ops[op.forward]
        if forward is None or base_name(forward.name) != "logsumexp":
            return False
        return any(out.neg_inf for out in forward.outputs) and _was_filled(forward.inputs[0], trace)
    if "softmax" in name or "scaled_dot_product" in name:
        # Of NaN it makes NaN; and a log-softmax has -inf where a row is masked in part, which is meant.
        empty = any(out.nan for out in op.outputs) and not any(operand.value.nan for operand in inputs)
        return empty and any(operand.value.neg_inf and _was_filled(operand, trace) for operand in inputs)
    if name in ADDITIONS and len(inputs) > 1:  # scores minus their largest
        return all(operand.value.neg_inf for operand in inputs) and _was_filled(inputs[0], trace)
    if name == "div" and len(inputs) > 1 and inputs[1].value.zeros:  # exp over the sum of them
        exps = [maker for maker in ancestors(inputs[1], trace, 3) if base_name(maker.name) == "exp"]
        return any(o.value.neg_inf and _was_filled(o, trace) for maker in exps for o in maker.inputs)
    return False


def _was_filled(operand: Operand, trace: Trace) -> bool:
    """Whether -inf was put there on purpose, not overflowed to."""
    if not operand.value.neg_inf:
        return False
    holder = first_holder(operand, trace)
    return holder is None or base_name(holder.name) in FILLS or -math.inf in holder.scalars


def _singular_slope(op: Op, forward: Op) -> Birth | None:
    name = base_name(forward.name)
    if name in NORMS | SPREADS:
        num = max((out.zeros for out in forward.outputs), default=0)
    elif is_singular_at_zero(forward):
        operands = forward.inputs[1:] if name == "div" and len(forward.inputs) > 1 else forward.inputs
        num = max((operand.value.zeros for operand in operands), default=0)
    elif name in AT_ONE:
        num = int(any(operand.value.largest == 1.0 for operand in forward.inputs))
    else:
        return None
    if not num:
        return None
    seen = f"{num:,} or more operands of {name} are exactly at the point where its slope is infinite"
    return Birth(op, "singular-gradient", seen)


def _meets_pole(op: Op) -> Birth | None:
    """A logarithm or quotient of exactly 0 in the forward pass: to blame only where nothing else is."""
    name = base_name(op.name)
    if op.phase == "backward" or not is_singular_at_zero(op) or not op.inputs or not op.inputs[-1].value.zeros:
        return None
    seen = f"{op.inputs[-1].value.zeros:,} operands of {name} are exactly 0, in FP32 too"
    return Birth(op, "singular-gradient", seen)


def overflows(trace: Trace) -> bool:
    """Whether the first inf of a step is a number that outgrew FP32: only a run that diverged gets there.

    What was not finite before the step, such as data or a buffer, tells nothing of that; a weight does.
    """
    for op in trace.ops:
        if op.phase in {"forward", "backward"} and any(out.nonfinite for out in op.outputs) and not _is_fill(op):
            return any(_outgrew(operand) for operand in op.inputs)
    return False


def _outgrew(operand: Operand) -> bool:
    if operand.value.nonfinite:
        return operand.made_by is not None or operand.role.startswith("param:")
    return operand.value.largest > HUGE
