"""Damage of any kind: where an error is born that no rounding explains, what a state loses, which choices change."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from floatline.base.patched_sources import read_source
from floatline.base.texts import percent
from floatline.causes import find_cause
from floatline.diagnosis.blame import ANY, CHOICE
from floatline.diagnosis.detectors import silent
from floatline.diagnosis.detectors.exceptions import describe_collision
from floatline.diagnosis.detectors.first_nonfinite import Birth, describe_birth, find_births
from floatline.diagnosis.detectors.kernels import find_wrong_kernels
from floatline.diagnosis.detectors.operations import (
    ADDITIONS,
    FORMATS,
    PERIODIC,
    ancestors,
    base_name,
    find_large_eps,
    find_rounding,
)
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.precision.user_frames import is_installed
from floatline.probe.trace.trace import Op, Operand, Trace, Values

# What is read is off by less than the first, what is made of it by more than the second.
CLEAN, DAMAGED = 0.05, 0.25
# Of the numbers of a state, this share is lost or inf.
SPOILT = 0.02
# Lines that may be tried in FP32.
MOST_CANDIDATES = 64
_UNDERFLOW = "optimizer-state-underflow"
# Operations that are looked at between a sum and the gradients it is made of.
_FARTHEST = 32
# A difference of near-equals is so many times farther off than what is subtracted.
_TIMES = 4.0
# What an average is made of.
_AVERAGING = ADDITIONS | {"mul", "lerp", "copy"}
# Operations between a choice and what made the numbers that are chosen by.
_NEAR = 6
# Of what is chosen, this share is another in FP32. Near-equal numbers change places without harm.
CHANGED = 0.05
# Where a trial shows that the numbers chosen by matter, this is enough to call it by.
SOME_CHANGED = 0.01


@dataclass(frozen=True)
class State:
    """What lives longer than a step and does not fit 16 bits.

    Args:
        op: That wrote it, or read what is spoilt.
        name: Of the state, such as 'exp_avg_sq'; '' where it has none.
        owner: The weight that it belongs to; '' where that is not known.
        share: Of its numbers that are spoilt.
        seen: In words.
    """

    op: Op
    name: str
    owner: str
    share: float
    seen: str


def find_spoilt_states(trace: Trace) -> list[State]:
    """States in 16 bits that are inf where FP32 is not, or 0; the worst of each name, inf first."""
    worst: dict[str, State] = {}
    for op in trace.ops:
        if op.phase not in ("update", "outside") or not op.outputs:
            continue
        for operand in op.inputs:
            if operand.role.startswith("state:") and operand.value.dtype in FORMATS:
                _keep_worst(worst, _judge_state(op, operand))
    return sorted(worst.values(), key=lambda state: (not state.seen.startswith("inf"), -state.share))


def _keep_worst(worst: dict[str, State], state: State | None) -> None:
    if state is not None and (state.name not in worst or worst[state.name].share < state.share):
        worst[state.name] = state


def _judge_state(op: Op, operand: Operand) -> State | None:
    owner, _, name = operand.role.removeprefix("state:").rpartition(".")
    value = operand.value
    if value.pos_inf:
        share = value.pos_inf / value.numel
        seen = (
            f"inf in {percent(share)} of {name} of {owner}, which is {value.dtype}: what is divided by it stands still"
        )
        return State(op, name, owner, share, seen) if share > SPOILT else None
    written = op.outputs[0] if op.inputs[0] is operand and op.name.endswith("_") else None
    if written is None or not written.lost:
        return None
    share = written.lost / max(1, written.numel - written.zeros + written.lost)
    seen = f"{percent(share)} of {name} of {owner} becomes 0 where it is written as {value.dtype}, and is not 0 in FP32"
    return State(op, name, owner, share, seen) if share > SPOILT else None


def place_state(state: State, narrowing: tuple[str, int], stepping: set[tuple[str, int]]) -> Finding:
    """The finding about a state.

    Args:
        state: The state.
        narrowing: File and line where 16-bit weights come from, for optimizers of torch.
        stepping: Files and lines that call an optimizer.
    """
    cause, op = find_cause("optimizer-state-underflow"), state.op
    file, line = op.file, op.line
    if (file, line) in stepping or is_installed(file):
        file, line = narrowing
    elif made := _find_assignment(file, state.name):
        line = made
    return Finding(cause, f"{state.seen}; FP32 keeps it", cause.advice, "optimizer.step", file, line, op.name)


def _find_assignment(file: str, key: str) -> int:
    """The first line of a file that puts something under a key, as `state["exp_avg"] = …`; 0 where there is none."""
    try:
        tree = ast.parse(read_source(Path(file)))
    except (OSError, SyntaxError, ValueError):
        return 0
    targets = (target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets)
    lines = [
        target.lineno
        for target in targets
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and target.slice.value == key
    ]
    return min(lines, default=0)


def find_amplified(trace: Trace) -> list[tuple[Op, Op, float]]:
    """Operations that make a large error of rounding: what rounded, what it became large in, and the error.

    What is read agrees with FP32 to the digits that 16 bits have, and what is made of it does not.
    """
    found: list[tuple[Op, Op, float]] = []
    for op in trace.ops:
        if op.phase != "forward" or not op.outputs or not op.inputs or op.outputs[0].nonfinite:
            continue
        out = op.outputs[0]
        worst = max(op.inputs, key=lambda operand: operand.value.error or 0.0)
        error = out.error or 0.0
        if not (out.numel > 1 and DAMAGED < error < math.inf and (worst.value.error or 0.0) < CLEAN):
            continue
        if _is_choice(out) or (out.dtype not in FORMATS and not worst.value.error):
            continue
        found.append((find_rounding(worst, trace) or op, op, error))
    return found


def find_changed_choices(trace: Trace, least: float = CHANGED) -> list[tuple[Op, float]]:
    """Operations of whose integers or truth values more than this are others in FP32, the largest share first."""
    found = [
        (op, max(out.error or 0.0 for out in op.outputs if _is_choice(out)))
        for op in trace.ops
        if op.phase in ("forward", "outside") and any(_is_choice(out) for out in op.outputs)
    ]
    return sorted((pair for pair in found if pair[1] > least), key=lambda pair: -pair[1])


def _is_choice(out: Values) -> bool:
    return out.error is not None and out.dtype.startswith(("int", "uint", "bool"))


def find_any_damage(trace: Trace) -> list[Finding]:
    """What may be to blame where nothing better is known: amplified rounding, then choices that change."""
    found: list[Finding] = []
    for rounding, op, error in find_amplified(trace)[:1]:
        periodic = base_name(op.name) in PERIODIC
        cause = "integer-not-exact" if periodic else ANY
        size = max((own.value.largest for own in op.inputs), default=0.0)
        read = f"{base_name(op.name)} of numbers up to {size:.4g}, off by less than {percent(CLEAN)}"
        there = "" if rounding is op else f" in line {op.line}"
        found.append(describe_birth(Birth(rounding, cause, f"{read}, is off by {percent(error)} of its size{there}")))
    for op, share in find_changed_choices(trace)[:1]:
        blamed = _blame_choice(op, trace)
        found.append(describe_choice(op, share, blamed))
    return found


def describe_choice(op: Op, share: float, blamed: Op) -> Finding:
    """The finding about a choice, at the operation that made what is chosen by, or at its own."""
    seen = f"{percent(share)} of what {base_name(op.name)} chooses is another in FP32"
    there = "" if (blamed.file, blamed.line) == (op.file, op.line) else f", in line {op.line}"
    return describe_birth(Birth(blamed, CHOICE, seen + there))


def _find_chosen_by(traces: Sequence[Trace]) -> dict[tuple[str, int], Finding]:
    """Lines that make, in 16 bits and with no error but rounding, the numbers that a changed choice is made by."""
    found: dict[tuple[str, int], Finding] = {}
    for trace in traces:
        for op, share in find_changed_choices(trace, SOME_CHANGED):
            for maker in [one for own in op.inputs for one in ancestors(own, trace, _NEAR)]:
                error = max((out.error or 0.0 for out in maker.outputs if out.dtype in FORMATS), default=0.0)
                if 0.0 < error < CLEAN:
                    found.setdefault((maker.file, maker.line), describe_choice(op, share, maker))
    return found


def describe_large_eps(op: Op, eps: float) -> Finding:
    """The finding about an eps of a 16-bit format that weighs against what it is added to."""
    value = op.inputs[0].value
    own = next(name for name, known in FORMATS.items() if find_format(known).epsilon == eps)
    what = "is added to" if base_name(op.name) in ADDITIONS else "bounds"
    seen = f"{eps:.2g}, the eps of {own}, {what} numbers from {value.smallest:.2g} to {value.largest:.2g}"
    return describe_birth(Birth(op, "eps-too-large", f"{seen}; FP32's own is 1.2e-07"))


def describe_cancellation(op: Op, error: float, trace: Trace) -> Finding:
    """The finding about a difference; where it is taken in FP32, at the line that rounded what is subtracted."""
    seen = f"the difference is off by {percent(error)} of its size, its operands by less than {percent(silent.CLEAN)}"
    worst = max(op.inputs, key=lambda operand: operand.value.error or 0.0)
    rounded = None if op.outputs[0].dtype in FORMATS else find_rounding(worst, trace)
    if rounded is None or (rounded.file, rounded.line) == (op.file, op.line):
        return describe_birth(Birth(op, "cancellation", seen))
    seen = f"line {op.line} subtracts in FP32 what this line rounded to 16 bits: {seen}"
    fix = "Compute what this line gives in FP32: the difference that is taken of it later is in FP32 already."
    return replace(describe_birth(Birth(rounded, "cancellation", seen)), fix=fix)


def find_wrong_results(trace: Trace) -> list[Finding]:
    """What is wrong in work without gradients, the surest first."""
    found = [*find_wrong_kernels(trace), *(describe_birth(birth) for birth in find_births(trace)[:1])]
    rows = [
        *silent.stuck_states(trace),
        *silent.stuck_sums(trace, ruinous=False),
        *silent.stuck_scatters(trace, ruinous=False),
    ]
    for op, share in rows[:1]:
        seen = f"{percent(share)} of what is added is lost"
        found.append(describe_birth(_name_sum(op, seen, trace)))
    found += [describe_collision(op, largest) for op, largest in silent.colliding_casts(trace)[:1]]
    found += [describe_cancellation(op, error, trace) for op, error in silent.cancelled(trace)[:1]]
    return found or find_any_damage(trace)


def find_candidates(traces: Sequence[Trace]) -> list[Finding]:
    """A finding for each line that gives 16 bits, in the order in which they run; nothing says that it matters."""
    known: dict[tuple[str, int], Finding] = {}
    for trace in traces:
        for finding in _find_likely(trace):
            known.setdefault((finding.file, finding.line), finding)
    worst: dict[tuple[str, int], tuple[int, float, Birth]] = {}
    order: list[tuple[str, int]] = []
    for trace in traces:
        order += _order_lines(trace)
        for op in trace.ops:
            error = max((out.error or 0.0 for out in op.outputs if out.dtype in FORMATS), default=0.0)
            birth = _name_loosely(op, error, trace)
            rank = (1 + (birth.cause == _UNDERFLOW) if birth.cause != ANY else 0, error)
            if error > 0.0 and rank > worst.get((op.file, op.line), (0, 0.0))[:2]:
                worst[op.file, op.line] = (*rank, birth)
    largest = sorted(worst, key=lambda place: -worst[place][1])[:MOST_CANDIDATES]
    kept = set(largest) | set(known)
    places = [place for place in dict.fromkeys(order) if place in kept and place[0]]
    chosen_by = _find_chosen_by(traces)
    for place in places:
        if place in chosen_by and place in worst and worst[place][2].cause == ANY:
            known.setdefault(place, chosen_by[place])
    return [known.get(place) or describe_birth(worst[place][2]) for place in places]


def _order_lines(trace: Trace) -> list[tuple[str, int]]:
    return [*dict.fromkeys((op.file, op.line) for op in trace.ops if op.phase != "backward")]


def _name_loosely(op: Op, error: float, trace: Trace) -> Birth:
    """The likeliest cause, if this operation turns out to matter."""
    name, read = base_name(op.name), max((own.value.error or 0.0 for own in op.inputs), default=0.0)
    seen = f"{name} is off by {error:.2g} of its size, and what it reads by {read:.2g}"
    if name.startswith(("_fused_", "_foreach_")) and op.phase == "update":
        return Birth(op, "update-lost-to-rounding", seen)
    if name in ADDITIONS | {"mul"} and op.name.endswith("_"):
        weight = op.phase == "update" or op.inputs[0].role.startswith("param:")
        return Birth(op, "update-lost-to-rounding", seen) if weight else _name_sum(op, seen, trace)
    if name in ("sub", "rsub") and error > _TIMES * read:
        return Birth(op, "cancellation", seen)
    if name in _AVERAGING and any(_is_kept(own, op) for own in op.inputs) and _writes_what_it_reads(op.file, op.line):
        return _name_sum(op, seen, trace)
    return Birth(op, ANY, seen)


def _is_kept(operand: Operand, op: Op) -> bool:
    """Whether it is a 16-bit state from before the step, as an average of the script's own is."""
    fits = op.outputs[0].numel == operand.value.numel > 0
    outside = fits and operand.made_by is None and operand.value.dtype in FORMATS
    return outside and (not operand.role or operand.role.startswith(("buffer:", "state:")))


@lru_cache(maxsize=256)
def _writes_what_it_reads(file: str, line: int) -> bool:
    """Whether a line makes something new of what it has, as `mean = 0.9 * mean + 0.1 * x` does."""
    try:
        tree = ast.parse(read_source(Path(file)))
    except (OSError, SyntaxError, ValueError):
        return False
    return any(
        _feeds_itself(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    )


def _feeds_itself(node: ast.stmt) -> bool:
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Assign):
        written, read = node.targets, [node.value]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        written, read = [node.value.func.value] if node.value.func.attr == "copy_" else [], list(node.value.args)
    else:
        return False
    names = {ast.unparse(one) for one in written}
    return any(ast.unparse(part) in names for one in read for part in ast.walk(one) if isinstance(part, ast.expr))


def _name_sum(op: Op, seen: str, trace: Trace) -> Birth:
    """A sum that loses what is added: what gradients are made of and becomes 0 is a state of an optimizer."""
    lost = any(value.lost for value in (*op.outputs, *(own.value for own in op.inputs)))
    if lost and _is_of_gradients(op, trace):
        return Birth(op, _UNDERFLOW, f"{seen}; some of it is 0 in 16 bits and not in FP32")
    return Birth(op, "accumulator-stagnation", seen)


def _is_of_gradients(op: Op, trace: Trace) -> bool:
    waiting, left = [op], _FARTHEST
    while waiting and left:
        left -= 1
        for own in waiting.pop().inputs:
            if own.role.startswith("grad:"):
                return True
            weight = own.role.startswith("param:")  # made of gradients, and none of them
            if not weight and own.made_by is not None and trace.ops[own.made_by].phase != "forward":
                waiting.append(trace.ops[own.made_by])
    return False


def _find_likely(trace: Trace) -> list[Finding]:
    """What numbers are known to be lost by, wherever it is seen."""
    found = [*find_wrong_kernels(trace), *(describe_birth(birth) for birth in find_births(trace))]
    found += [describe_large_eps(op, eps) for op in trace.ops if (eps := find_large_eps(op)) is not None]
    sums = [*silent.stuck_states(trace), *silent.stuck_sums(trace, ruinous=False)]
    sums += silent.stuck_scatters(trace, ruinous=False)
    for op, share in sums:
        found.append(describe_birth(_name_sum(op, f"{percent(share)} of what is added is lost", trace)))
    found += [describe_collision(op, largest) for op, largest in silent.colliding_casts(trace)]
    found += [describe_cancellation(op, error, trace) for op, error in silent.cancelled(trace)]
    for op, error in silent.amplified(trace):
        size = max(operand.value.largest for operand in op.inputs)
        seen = f"{base_name(op.name)} of numbers up to {size:.4g} is off by {percent(error)} of its size"
        found.append(describe_birth(Birth(op, "integer-not-exact", seen)))
    return found


def _blame_choice(op: Op, trace: Trace) -> Op:
    """What made the numbers that are chosen by too coarse or too large."""
    worst = max(op.inputs, key=lambda operand: operand.value.error or 0.0, default=None)
    blown = next((own for own in op.inputs if own.value.blown), None)
    operand = blown or worst
    if operand is None or operand.made_by is None:
        return op
    made = trace.ops[operand.made_by]
    if blown is not None:
        return made
    exact = find_format(FORMATS[operand.value.dtype]).max_exact_integer if operand.value.dtype in FORMATS else math.inf
    return (find_rounding(operand, trace) or op) if operand.value.largest > exact else op
