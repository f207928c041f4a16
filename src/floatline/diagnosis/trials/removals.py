"""Removals: how each finding can be taken away mechanically in a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from floatline.diagnosis.detectors.loss_scale import best_factor, present_scale, say_scale
from floatline.diagnosis.detectors.operations import FILLS, FORMATS, MATMULS, ancestors, base_name
from floatline.diagnosis.evidence import Evidence
from floatline.findings import Finding
from floatline.precision.islands import Line
from floatline.probe.runs.runs import Change
from floatline.probe.trace.trace import Op, Trace

# Causes whose damage is in the operands already: what made them must be FP32 as well.
_INHERITED = frozenset(["rounded-onto-singularity", "eps-underflow", "cancellation", "integer-not-exact"])
_UPDATES = frozenset(["update-lost-to-rounding", "decay-lost-to-rounding", "optimizer-state-underflow"])
_RAISED = frozenset(["unsupported-half-op", "dtype-mismatch", "autocast-region-misuse"])


@dataclass(frozen=True)
class Removal:
    """What a replay takes away.

    Args:
        text: It ends the word "with": '`blocks.1.ff.wo` in FP32'.
        change: The same for a replay.
        whole_run: Whether only a whole run can tell what it does.
    """

    text: str
    change: Change
    whole_run: bool = False


def find_removals(finding: Finding, trace: Trace | None, evidence: Evidence) -> list[Removal]:
    """Ways to take a finding away, the smallest first; none where nothing mechanical does."""
    first = _find_smallest(finding, trace, evidence)
    if first is None:
        return []
    if trace is None or not first.change.lines or finding.cause.id not in _INHERITED:
        return [first]
    lines = _lines_of(finding, trace, depth=4)
    wider = Removal(f"{_say(lines)} in FP32", Change(lines=tuple(lines)))
    return [first] if len(lines) == len(first.change.lines) else [first, wider]


def _find_smallest(finding: Finding, trace: Trace | None, evidence: Evidence) -> Removal | None:
    cause, line = finding.cause.id, (finding.file, finding.line)
    if evidence.given.exception is not None:
        return _for_exception(cause, line)
    if cause in _UPDATES:
        return Removal("updates of FP32 weights and FP32 optimizer state", Change(fp32_updates=True), whole_run=True)
    if trace is None or finding.cause.family not in ("range", "rounding"):
        return None
    if cause == "gradient-underflow" or (cause == "gradient-overflow" and finding.op == "backward"):
        factor = best_factor(trace)
        if factor == 1.0:
            return None
        scale = present_scale(evidence, trace) * factor
        return Removal(f"a loss scale of {say_scale(scale)}", Change(loss_factor=factor))
    if cause == "scalar-out-of-range" and _is_fill(finding, trace):
        return Removal(f"a constant that fits at {_say([line])}", Change(fitting=(line,)))
    if finding.module and cause != "accumulator-stagnation":
        return Removal(f"`{finding.module}` in FP32", Change(islands=(finding.module,)))
    if not finding.line:
        return None
    lines = _lines_of(finding, trace, depth=0)
    return Removal(f"{_say(lines)} in FP32", Change(lines=tuple(lines)))


def join_removals(removals: Sequence[Removal]) -> Removal:
    """All of them at once."""
    changes = [removal.change for removal in removals]
    factor = 1.0
    for change in changes:
        factor *= change.loss_factor
    joint = Change(
        islands=tuple(dict.fromkeys(name for change in changes for name in change.islands)),
        lines=tuple(dict.fromkeys(line for change in changes for line in change.lines)),
        fitting=tuple(dict.fromkeys(line for change in changes for line in change.fitting)),
        loss_factor=factor,
        fp32_updates=any(change.fp32_updates for change in changes),
    )
    return Removal(", ".join(removal.text for removal in removals), joint, any(r.whole_run for r in removals))


def _for_exception(cause: str, line: Line) -> Removal | None:
    if not line[1]:
        return None
    if cause == "scalar-out-of-range":
        return Removal(f"a constant that fits at {_say([line])}", Change(fitting=(line,)), whole_run=True)
    if cause in _RAISED:
        return Removal(f"{_say([line])} in FP32", Change(lines=(line,)), whole_run=True)
    return None


def _is_fill(finding: Finding, trace: Trace) -> bool:
    return any(base_name(op.name) in FILLS for op in _ops_at(finding, trace))


def _ops_at(finding: Finding, trace: Trace) -> list[Op]:
    return [op for op in trace.ops if op.phase in ("forward", "outside") and (op.file, op.line) == _line(finding)]


def _line(finding: Finding) -> Line:
    return finding.file, finding.line


def _lines_of(finding: Finding, trace: Trace, *, depth: int) -> list[Line]:
    """The line of a finding, and those of what made its operands, some operations back.

    In the same function all lines between count: a cast that does nothing in 16 bits is not in the trace.
    """
    lines: dict[Line, None] = {_line(finding): None}
    for op in _ops_at(finding, trace):
        # In place: the tensor has the dtype that it was made in.
        operands = op.inputs[:1] if op.name.endswith("_") and not depth else op.inputs
        for operand in operands:
            for maker in ancestors(operand, trace, depth or int(op.name.endswith("_"))):
                if maker.line and any(out.dtype in FORMATS for out in maker.outputs) and _widens(maker, finding):
                    lines[maker.file, maker.line] = None
                    if depth and maker.function == op.function and maker.file == op.file:
                        lines |= {(op.file, line): None for line in range(maker.line, op.line)}
    return list(lines)


def _widens(maker: Op, finding: Finding) -> bool:
    """Whether a maker of operands belongs to the place: products are a place of their own, but for a difference."""
    return finding.cause.id == "cancellation" or base_name(maker.name) not in MATMULS


def _say(lines: Sequence[Line]) -> str:
    """'loss.py:31' or 'lines 31 and 34 of loss.py'."""
    names = dict.fromkeys(Path(file).name for file, _ in lines)
    if len(lines) == 1:
        return f"{Path(lines[0][0]).name}:{lines[0][1]}"
    numbers = sorted({line for _, line in lines})
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"lines {numbers[0]} to {numbers[-1]} of {', '.join(names)}"
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    return f"lines {listed} of {', '.join(names)}"
