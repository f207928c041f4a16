"""Damage without inf or NaN: what vanishes, stands still, collides or cancels in 16 bits."""

from __future__ import annotations

import math

from floatline.diagnosis.detectors.operations import (
    ADDITIONS,
    CASTS,
    FORMATS,
    LINEAR,
    PERIODIC,
    PRODUCTS,
    SCATTERED,
    ancestors,
    base_name,
)
from floatline.formats import find_format
from floatline.probe.trace.trace import Op, Operand, Trace, Values

# Shares and errors from which damage is spoken of.
LOST_SHARE = 0.05
STUCK_SHARE = 0.5
CANCELLED = 0.25
CLEAN = 0.05
GROWN = 0.1
RUINED = 0.5


def lost_gradients(trace: Trace) -> dict[str, float]:
    """Share of each parameter's gradient that underflows to zero in 16 bits, where it is worth speaking of."""
    if not any(is_underflow(out) for op in trace.ops if op.phase != "update" for out in op.outputs):
        return {}  # terms that are equal in 16 bits cancel to zero as well
    shares = {
        name: (value.lost or 0) / (value.numel - (value.zeros - (value.lost or 0)))
        for name, value in ((name, operand.value) for name, operand in trace.gradients.items())
        if value.numel and value.lost
    }
    return {name: share for name, share in shares.items() if share > LOST_SHARE}


def is_underflow(out: Values) -> bool:
    """Whether many numbers became zero because they are below what the format holds."""
    if out.dtype not in FORMATS or (out.lost or 0) <= LOST_SHARE * max(1, out.numel):
        return False
    return min(out.smallest, out.twin_largest or 0.0) < find_format(FORMATS[out.dtype]).min_normal


def first_lost(trace: Trace) -> Op | None:
    """The first operation of the backward pass that turns gradients to zero which FP32 keeps."""
    for op in trace.ops:
        if op.phase != "backward" or not op.outputs:
            continue
        before = sum(operand.value.lost or 0 for operand in op.inputs)
        if not before and any(is_underflow(out) for out in op.outputs):
            return op
    return None


def stuck_updates(trace: Trace) -> list[tuple[Op, float]]:
    """Updates of 16-bit weights that leave most of the elements as they are, with the share; the largest first."""
    return [(op, share) for op, share in _stuck_writes(trace) if not is_decay(op)]


def stuck_decays(trace: Trace) -> list[tuple[Op, float]]:
    """The same of products of 16-bit weights and a number below 1, by which weights are to shrink."""
    return [(op, share) for op, share in _stuck_writes(trace) if is_decay(op)]


def is_decay(op: Op) -> bool:
    """Whether an update multiplies a weight by a number of the code."""
    return base_name(op.name) in ("mul", "_foreach_mul")


def _stuck_writes(trace: Trace) -> list[tuple[Op, float]]:
    found: list[tuple[Op, float]] = []
    for op in trace.ops:
        if op.phase != "update" or not op.moved or not _writes_weight(op):
            continue
        share = (op.stuck or 0) / op.moved
        if share > STUCK_SHARE:
            found.append((op, share))
    return sorted(found, key=lambda pair: -(pair[0].stuck or 0))


def _writes_weight(op: Op) -> bool:
    return any(operand.role.startswith("param:") and operand.value.dtype in FORMATS for operand in op.inputs)


def stuck_sums(trace: Trace, *, ruinous: bool) -> list[tuple[Op, float]]:
    """Rows of sums in the forward pass that stand still in 16 bits, such as an integrator's.

    Args:
        trace: The step.
        ruinous: Whether only those count that something later in the forward pass is mostly wrong after.
    """
    # One addition that rounds away is rounding; a row of them is a sum that stands still.
    rows = [(op, share) for op, share, ops in _still(trace) if len(ops) >= 8]
    return [(op, share) for op, share in rows if not ruinous or _grows(op, trace, RUINED)]


def stuck_scatters(trace: Trace, *, ruinous: bool) -> list[tuple[Op, float]]:
    """Sums by index, as graph networks make them, that lose what is added: a GPU rounds after every addition.

    Args:
        trace: The step.
        ruinous: Whether only those count that are mostly wrong.
    """
    found: list[tuple[Op, float]] = []
    for op in trace.ops:
        if op.phase != "forward" or base_name(op.name) not in SCATTERED or not op.outputs:
            continue
        out = op.outputs[0]
        worst = max((operand.value.error or 0.0 for operand in op.inputs), default=0.0)
        if (
            out.dtype in FORMATS
            and not out.nonfinite
            and worst < CLEAN
            and (out.error or 0.0) > (RUINED if ruinous else GROWN)
        ):
            found.append((op, out.error or 0.0))
    return found


def stuck_states(trace: Trace) -> list[tuple[Op, float]]:
    """Sums that stand still in what lives longer than the step: averages, counters."""
    return [(op, share) for op, share, ops in _still(trace) if _is_kept(ops[-1], trace)]


def _still(trace: Trace) -> list[tuple[Op, float, list[Op]]]:
    """The sums of each line that leave most elements as they are: the worst, the share, and all."""
    groups: dict[tuple[str, int, str], list[Op]] = {}
    for op in trace.ops:
        is_sum = op.phase in ("forward", "outside") and base_name(op.name) in ADDITIONS
        if is_sum and op.moved and op.outputs and op.outputs[0].dtype in FORMATS:
            groups.setdefault((op.file, op.line, op.name), []).append(op)
    found: list[tuple[Op, float, list[Op]]] = []
    for ops in groups.values():
        moved, stuck = sum(op.moved or 0 for op in ops), sum(op.stuck or 0 for op in ops)
        if stuck / moved > STUCK_SHARE:
            found.append((max(ops, key=lambda op: op.stuck or 0), stuck / moved, ops))
    return sorted(found, key=lambda entry: -entry[1])


def _is_kept(op: Op, trace: Trace) -> bool:
    """Whether the sum goes into something that lives longer than the step.

    In place that is seen by where it is written. Outside forward and backward, `ema = d * ema + (1 - d) * w` is
    one too: it reads 16-bit numbers of its own shape that no one made in this step.
    """
    if op.name.endswith("_"):
        while op.inputs and op.inputs[0].made_by is not None and trace.ops[op.inputs[0].made_by].name.endswith("_"):
            op = trace.ops[op.inputs[0].made_by]  # mul_().add_(): the same memory, written twice
        return bool(op.inputs) and op.inputs[0].made_by is None
    if op.phase != "outside":
        return False
    makers = [op, *(maker for operand in op.inputs for maker in ancestors(operand, trace, 2))]
    return any(
        operand.made_by is None and operand.value.dtype in FORMATS and operand.value.shape == op.outputs[0].shape
        for maker in makers
        for operand in maker.inputs
        if not operand.role.startswith(("inputs", "targets", "param"))
    )


def colliding_casts(trace: Trace) -> list[tuple[Op, float]]:
    """Whole numbers that 16 bits cannot hold and whose loss grows later in the step, with the largest of them.

    Numbers of the batch that large count, too, whole or not: beyond it 16 bits have not even the whole ones.
    """
    found: list[tuple[Op, float]] = []
    for op in trace.ops:
        if op.phase != "forward" or not op.outputs or op.outputs[0].dtype not in FORMATS or op.outputs[0].blown:
            continue
        largest = largest_whole(op, trace)
        exact = find_format(FORMATS[op.outputs[0].dtype]).max_exact_integer
        if largest > exact and op.outputs[0].error and _grows(op, trace, GROWN):
            found.append((op, largest))
    return found


def largest_whole(op: Op, trace: Trace) -> float:
    """The largest whole number that the operation turns into 16 bits; 0 where it does not."""
    name = base_name(op.name)
    if name == "arange":
        return op.outputs[0].twin_largest or 0.0
    if name not in CASTS | ADDITIONS | PRODUCTS | {"div"}:
        return 0.0  # an index is an integer as well, and stays one
    casts = name in CASTS
    return max((x.value.largest for x in op.inputs if _is_whole(x, trace) or (casts and _is_batch(x))), default=0.0)


def _is_batch(operand: Operand) -> bool:
    """Whether an operand is an FP32 tensor of the batch, as it was given."""
    return operand.role.startswith("inputs[") and operand.value.dtype == "float32"


def _is_whole(operand: Operand, trace: Trace) -> bool:
    """Whether an operand holds whole numbers: integers, floats counted out, or a batch of such."""
    if operand.value.dtype.startswith(("int", "uint")) or operand.role in trace.meta.get("whole", ()):
        return True
    maker = None if operand.made_by is None else trace.ops[operand.made_by]
    return maker is not None and base_name(maker.name) == "arange" and operand.value.dtype not in FORMATS


def _grows(op: Op, trace: Trace, least: float) -> bool:
    """Whether a small error becomes a large one, or another whole number, in what follows in the forward pass.

    A count that is divided by is off by a fraction and stays so. A sine, a difference or a table is off by all.
    """
    reached = {op.index}
    for later in trace.ops[op.index :]:
        if later.phase != "forward" or not (
            later.index in reached or any(operand.made_by in reached for operand in later.inputs)
        ):
            continue
        reached.add(later.index)
        for out in later.outputs:
            if out.dtype.startswith("int") or (out.error is not None and out.error > least):
                return True
    return False


def cancelled(trace: Trace) -> list[tuple[Op, float]]:
    """Differences of near-equals: the error is as large as the result, while the operands are sound.

    The difference may be taken in FP32, of numbers that came through 16 bits. One of them may be a number of the code,
    but not where the other is made of such a difference (`ratio - 1` shows the error of what the ratio is made of), nor
    where the result is but added up (`1 - cosine` of a model that has converged: no gradient depends on it). Those
    against the targets come last: training itself makes them small.
    """
    found: list[tuple[Op, float]] = []
    spoilt: set[int] = set()  # operations that are made of what was found
    for op in trace.ops:
        if any(operand.made_by in spoilt for operand in op.inputs):
            spoilt.add(op.index)
        if op.phase != "forward" or base_name(op.name) not in ADDITIONS or not op.outputs or not op.inputs:
            continue
        out = op.outputs[0]
        error = out.error
        if error is None or not math.isfinite(error):
            continue
        worst = max((operand.value.error or 0.0 for operand in op.inputs), default=0.0)
        smaller = (out.twin_largest or 0.0) < 0.1 * min(operand.value.largest for operand in op.inputs)
        if not (error > CANCELLED and worst < CLEAN and smaller) or (out.numel < 2 and not _is_wide(op, trace)):
            continue
        if len(op.inputs) > 1 or not (op.index in spoilt or _is_added_up(op, trace)):
            found.append((op, error))
            spoilt.add(op.index)
    return sorted(found, key=lambda pair: any(_is_target(operand, trace) for operand in pair[0].inputs))


def _is_wide(op: Op, trace: Trace) -> bool:
    """Whether a single number is made of many, and goes into many: a statistic, not the loss."""
    made = any(
        own.value.numel > 1 for operand in op.inputs for maker in ancestors(operand, trace, 3) for own in maker.inputs
    )
    reached = {op.index}
    for later in trace.ops[op.index + 1 :]:
        if later.phase == "forward" and any(operand.made_by in reached for operand in later.inputs):
            if any(out.numel > 1 for out in later.outputs):
                return made
            reached.add(later.index)
    return False


def amplified(trace: Trace) -> list[tuple[Op, float]]:
    """Sines and other periodic operations that make a large error of rounding, with the error of what they give.

    What they read agrees with FP32 to the last digits that 16 bits have, and what they give does not.
    """
    found: list[tuple[Op, float]] = []
    for op in trace.ops:
        if op.phase != "forward" or base_name(op.name) not in PERIODIC or not op.outputs or not op.inputs:
            continue
        out = op.outputs[0]
        worst = max((operand.value.error or 0.0 for operand in op.inputs), default=0.0)
        if out.numel > 1 and not out.nonfinite and 0.0 < worst < CLEAN and CANCELLED < (out.error or 0.0) < math.inf:
            found.append((op, out.error or 0.0))
    return found


def _is_added_up(op: Op, trace: Trace) -> bool:
    """Whether its results are only added up, or multiplied by numbers of the code, until the forward pass ends."""
    reached = {op.index}
    for later in trace.ops[op.index + 1 :]:
        if later.phase != "forward" or not any(operand.made_by in reached for operand in later.inputs):
            continue
        scales = base_name(later.name) in ("mul", "div") and len(later.inputs) == 1
        if not (scales or base_name(later.name) in LINEAR):
            return False
        reached.add(later.index)
    return True


def _is_target(operand: Operand, trace: Trace) -> bool:
    """Whether it is a target of the batch, as it came or cast."""
    while operand.made_by is not None:
        maker = trace.ops[operand.made_by]
        if base_name(maker.name) not in CASTS or not maker.inputs:
            return False
        operand = maker.inputs[0]
    return operand.role.startswith("targets")


def find_damage(trace: Trace) -> list[tuple[str, Op]]:
    """Cause and operation of all that vanishes, stands still, collides or cancels."""
    found: list[tuple[str, Op]] = []
    lost = first_lost(trace) if lost_gradients(trace) else None
    if lost is not None:
        found.append(("gradient-underflow", lost))
    for op, _ in [*stuck_states(trace), *stuck_sums(trace, ruinous=False)]:
        found.append(("accumulator-stagnation", op))
    found += [("accumulator-stagnation", op) for op, _ in stuck_scatters(trace, ruinous=False)]
    found += [("integer-not-exact", op) for op, _ in colliding_casts(trace)]
    found += [("cancellation", op) for op, _ in cancelled(trace)]
    return found
