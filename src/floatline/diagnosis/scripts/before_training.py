"""What a script did to its numbers in 16 bits before it trained: tables, schedules, statistics, cached data."""

from __future__ import annotations

from floatline.base.texts import percent
from floatline.diagnosis.detectors import silent
from floatline.diagnosis.detectors.exceptions import describe_collision
from floatline.diagnosis.detectors.first_nonfinite import Birth, describe_birth, find_births
from floatline.diagnosis.detectors.operations import ADDITIONS, CASTS, PRODUCTS, base_name, reached_by
from floatline.diagnosis.scripts.evidence import ScriptEvidence, reads_inf
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.probe.trace.trace import Op, Trace

# Operations of one line that are a running sum or product, and the error by which it is ruined: in BF16, roundings that
# go both ways come to that after some thousand.
_ROW, _RUINED = 8, 0.1


def find_failing_setup(evidence: ScriptEvidence) -> list[Finding]:
    """Where inf or NaN was made in 16 bits before training, of which a step that fails is made."""
    setup = evidence.setup
    if setup is None or not evidence.fails or not any(reads_inf(one.trace) for one in evidence.failed):
        return []
    births = [birth for birth in find_births(setup) if any(out.pos_inf or out.nan for out in birth.op.outputs)]
    return [describe_birth(birth) for birth in births if _is_kept(birth.at or birth.op, setup)][:1]


def find_damaged_setup(evidence: ScriptEvidence) -> list[Finding]:
    """What is far from FP32 before training begins, and is read by it."""
    setup = evidence.setup
    if setup is None or evidence.fails:
        return []
    for cause, op, seen in _find_damage(setup):
        if _is_kept(op, setup):
            return [describe_birth(Birth(op, cause, seen))]
    if any(_makes_integers(one.trace) for one in evidence.captured):
        collisions = [(op, top) for op, top in _find_collisions(setup) if _is_kept(op, setup)]
        return [describe_collision(op, top) for op, top in collisions[:1]]
    return []


def find_suspects_in_setup(evidence: ScriptEvidence) -> list[Finding]:
    """What may be to blame for a run that is apart from FP32: inf and whole numbers that are not exact, where kept."""
    setup = evidence.setup
    if setup is None:
        return []
    found = [describe_birth(birth) for birth in find_births(setup) if _is_kept(birth.at or birth.op, setup)]
    tables = any(_makes_integers(one.trace, given=False) for one in evidence.captured)
    collisions = _find_collisions(setup, tables=tables)
    found += [describe_collision(op, top) for op, top in collisions if _is_kept(op, setup)]
    return found[:1]


def _find_damage(setup: Trace) -> list[tuple[str, Op, str]]:
    found = [
        ("accumulator-stagnation", op, f"after {num:,} additions or products the result is off by {percent(error)}")
        for op, num, error in _find_rows(setup)
    ]
    for op, error in silent.cancelled(setup):
        seen = (
            f"the difference is off by {percent(error)} of its size, its operands by less than {percent(silent.CLEAN)}"
        )
        found.append(("cancellation", op, seen))
    return found


def _find_rows(setup: Trace) -> list[tuple[Op, int, float]]:
    """Running sums and products of one line, in a loop or as one operation, whose last result is ruined."""
    rows: dict[tuple[str, int, str], list[Op]] = {}
    for op in setup.ops:
        name = base_name(op.name)
        if op.outputs and op.outputs[0].dtype in silent.FORMATS and not op.outputs[0].nonfinite:
            if name in ADDITIONS | PRODUCTS:
                rows.setdefault((op.file, op.line, op.name), []).append(op)
            elif name in ("cumsum", "cumprod") and op.inputs and (op.inputs[0].value.error or 0.0) < silent.CLEAN:
                rows[op.file, op.line, f"{op.name} {op.index}"] = [op] * _ROW
    found = [(ops[-1], len(ops), ops[-1].outputs[0].error or 0.0) for ops in rows.values() if len(ops) >= _ROW]
    return [(op, num, error) for op, num, error in found if error > _RUINED]


def _find_collisions(setup: Trace, *, tables: bool = False) -> list[tuple[Op, float]]:
    """Casts of whole numbers that 16 bits cannot hold; with `tables`, of numbers so large, whole ones among others."""
    whole = ("int", "uint", "float") if tables else ("int", "uint")
    found: list[tuple[Op, float]] = []
    for op in setup.ops:
        if base_name(op.name) not in CASTS or not op.outputs or op.outputs[0].dtype not in silent.FORMATS:
            continue
        exact = find_format(silent.FORMATS[op.outputs[0].dtype]).max_exact_integer
        top = max((o.value.largest for o in op.inputs if o.value.dtype.startswith(whole)), default=0.0)
        if top > exact and op.outputs[0].error:
            found.append((op, top))
    return found


def _makes_integers(trace: Trace, *, given: bool = True) -> bool:
    """Whether a step makes integers, such as the indices of a table, of floating-point numbers, given or its own."""
    return any(
        base_name(op.name) in CASTS
        and any(out.dtype == "int64" for out in op.outputs)
        and any((o.made_by is None or not given) and o.value.dtype.startswith(("float", "bfloat")) for o in op.inputs)
        for op in trace.ops
    )


def _is_kept(op: Op, setup: Trace) -> bool:
    """Whether the damage of an operation is in something that is alive when training begins."""
    return not reached_by(op, setup).isdisjoint(setup.meta["kept"])
