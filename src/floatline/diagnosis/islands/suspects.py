"""Suspects: which modules a trace accuses, the strongest evidence first. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from floatline.diagnosis.detectors.first_nonfinite import find_births, is_search, keep_harmful
from floatline.diagnosis.detectors.operations import FORMATS, base_name
from floatline.diagnosis.detectors.silent import CLEAN, GROWN, find_damage
from floatline.precision.islands import Line
from floatline.probe.trace.trace import Op, Trace


@dataclass(frozen=True)
class Suspect:
    """A module that a trace accuses.

    Args:
        module: Its name; '' is the model's own code, or code outside of it.
        seen: The evidence, with numbers.
        line: The user's line; line 0 where there is none.
        cause: Id of the cause; '' where the error only grows there.
    """

    module: str
    seen: str
    line: Line
    cause: str = ""


def find_suspects(trace: Trace) -> list[Suspect]:
    """Modules in which inf or NaN are born, then those that lose numbers, then those in which errors grow most."""
    if "raised" in trace.meta:
        file, line, words = trace.meta["raised"]
        return [Suspect("", words, (file, line))]
    scale = float(trace.meta.get("scale", 1.0))
    births = [birth for birth in find_births(trace) if scale == 1.0 or not is_search(birth, scale)]
    rows: list[Suspect] = []
    for birth in keep_harmful(births, trace):
        rows.append(_accuse(birth.op, birth.seen, birth.cause))
        if birth.at is not None:  # what shows it may be the one that needs the range
            rows.append(_accuse(birth.at, birth.seen, birth.cause))
    if not rows:
        rows += [_accuse(op, f"{base_name(op.name)}: {cause}", cause) for cause, op in find_damage(trace)]
        rows += _find_growth(trace)
    return list(dict.fromkeys(rows))


def count_operations(trace: Trace, *, lines: frozenset[Line]) -> int:
    """Operations of the forward pass on some lines whose results are 16-bit."""
    return sum((op.file, op.line) in lines for op in narrow_operations(trace))


def narrow_operations(trace: Trace) -> list[Op]:
    """Operations of the forward pass whose results are 16-bit, in order."""
    return [op for op in trace.ops if op.phase == "forward" and any(out.dtype in FORMATS for out in op.outputs)]


def _find_growth(trace: Trace) -> list[Suspect]:
    """Operations that make a large error of operands with a small one."""
    found: list[tuple[float, Suspect]] = []
    for op in trace.ops:
        if op.phase not in ("forward", "backward") or not op.outputs:
            continue
        error = max((out.error or 0.0 for out in op.outputs if out.numel > 1), default=0.0)
        before = max((operand.value.error or 0.0 for operand in op.inputs), default=0.0)
        if error > GROWN and before < CLEAN and not math.isnan(error):
            seen = f"{base_name(op.name)} is {100 * error:.0f} % off FP32, its operands {100 * before:.1g} %"
            found.append((error, _accuse(op, seen)))
    return [suspect for _, suspect in sorted(found, key=lambda pair: -pair[0])]


def _accuse(op: Op, seen: str, cause: str = "") -> Suspect:
    return Suspect(op.module, seen, (op.file, op.line), cause)
