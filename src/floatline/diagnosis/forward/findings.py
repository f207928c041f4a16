"""Findings of a forward pass: the detectors of a training step are asked, and their suspects tried on outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from floatline.causes import find_cause
from floatline.diagnosis.blame import ANY, UNSURE
from floatline.diagnosis.detectors.damage import (
    describe_choice,
    find_candidates,
    find_changed_choices,
    find_wrong_results,
)
from floatline.diagnosis.detectors.exceptions import find_exceptions, find_wrong_indices
from floatline.diagnosis.detectors.first_nonfinite import Birth, describe_birth
from floatline.diagnosis.detectors.numbers import find_failures
from floatline.diagnosis.detectors.operations import FORMATS, ancestors, base_name
from floatline.diagnosis.forward.evidence import ForwardEvidence
from floatline.diagnosis.forward.result import say_percent
from floatline.diagnosis.islands.island import Island
from floatline.diagnosis.islands.judge import IslandJudge
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.precision.dtypes import DTYPES, NARROW
from floatline.precision.islands import Line
from floatline.probe.steps.captured_forward import CapturedForward
from floatline.probe.trace.trace import Op, Trace

# Lines that are tried in FP32 one by one, and of those behind one that helps.
_MOST_TRIED, _MOST_LATER = 6, 3
# A line is to blame if FP32 there takes away this much of what the outputs are off by.
_HELPS = 0.5
# Weights that a cast changes by this share of their size have lost more than digits.
_LOST = 0.05
# Operations between a choice and what it chooses by.
_FAR = 3


@dataclass(frozen=True)
class _Suspect:
    """A finding, and the lines that are computed in FP32 to try it."""

    finding: Finding
    lines: tuple[Line, ...]


def find_loud(evidence: ForwardEvidence) -> list[Finding]:
    """Why the pass raises, or gives what is not finite."""
    for family in (
        lambda: find_exceptions(evidence.given, evidence.fp32),
        lambda: find_wrong_indices(evidence),
        lambda: find_unfit_weights(evidence) if evidence.fails and not evidence.fails_in_fp32 else [],
        lambda: find_failures(evidence),
    ):
        found = family()
        if found:
            return found
    return []


def find_unfit_weights(evidence: ForwardEvidence) -> list[Finding]:
    """Weights of the checkpoint that the format cannot hold, at the operation that reads them first."""
    step, trace = evidence.forward, evidence.trace(0)
    if step is None or trace is None:
        return []
    fmt = find_format(step.plan.compute)
    for name, values in step.state.captured.items():
        top = float(values.detach().abs().max()) if values.is_floating_point() and values.numel() else 0.0
        if _is_cast(step, name) and fmt.overflow_at <= top < math.inf:
            seen = f"{name} holds {top:.4g}, and {step.plan.compute} ends at {fmt.max:g}"
            return [_at_reader(name, "activation-overflow", seen, trace)]
    return []


def find_lost_weights(evidence: ForwardEvidence) -> list[Finding]:
    """Weights that the cast to the format changes by more than rounding: they are too small for it."""
    step, trace = evidence.forward, evidence.trace(0)
    if step is None or trace is None:
        return []
    rows: list[tuple[float, str]] = []
    for name, values in step.state.captured.items():
        if _is_cast(step, name) and values.is_floating_point() and values.numel():
            wide = values.double()
            narrow = wide.to(DTYPES[step.plan.compute]).double()
            lost = _norm(narrow - wide) / max(_norm(wide), 1e-300)
            rows += [(lost, name)] if lost > _LOST else []
    return [
        _at_reader(
            name, ANY, f"the cast to {step.plan.compute} changes {name} by {say_percent(lost)} of its size", trace
        )
        for lost, name in sorted(rows, reverse=True)[:1]
    ]


def _norm(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.square().sum()))


def _is_cast(step: CapturedForward, name: str) -> bool:
    return step.plan.weights != "fp32" and (name in step.state.cast_too or step.state.captured[name].dtype in NARROW)


def _at_reader(name: str, cause_id: str, seen: str, trace: Trace) -> Finding:
    role = f"param:{name}"
    op = next((op for op in trace.ops if any(operand.role == role for operand in op.inputs)), None)
    cause, module = find_cause(cause_id), name.rpartition(".")[0]
    if op is None:
        return Finding(cause, seen, cause.advice, module)
    return replace(describe_birth(Birth(op, cause_id, seen)), module=module)


def find_silent(evidence: ForwardEvidence, judge: IslandJudge) -> tuple[list[Finding], str]:
    """What makes outputs other than FP32's, each suspect tried by its line in FP32; and what was tried, in words.

    Several outputs may be off for several causes: where a line helps some of them, it stays in FP32, and the others are
    looked at with it.
    """
    trace = evidence.trace(0)
    if trace is None:
        return [], ""
    tries, found, said = _LineTries(judge), list[Finding](), list[str]()
    for suspect in _find_suspects(trace):
        if not tries.left:
            break
        if not tries.help(suspect.lines):
            continue
        later = tries.find_later(suspect, trace) if suspect.finding.cause.id in UNSURE else None
        blamed = later or suspect
        found.append(blamed.finding)
        said.append(tries.settle(blamed.lines))
    if found:
        return found, " ".join(said)
    num = len(tries.tried)
    words = f"{num} suspected lines were computed in FP32, and none brings FP32's outputs back" if num else ""
    whole = judge.outcome(0, ("",))
    return ([], words) if whole.passes else (find_in_cast(evidence), words)


class _LineTries:
    """Lines computed in FP32, and what that does to the outputs.

    Attributes:
        tried: Errors of the outputs, by lines.
        left: Outputs that are off, and that no line was blamed for yet, with their errors.
    """

    def __init__(self, judge: IslandJudge) -> None:
        self.tried: dict[tuple[Line, ...], dict[str, float]] = {}
        self._judge, self._kept = judge, tuple[Line, ...]()
        self.left = {name: error for name, error in judge.errors(0).items() if not judge.is_near(0, name, error)}
        self._several = len(self.left) > 1

    def help(self, lines: tuple[Line, ...]) -> bool:
        """Whether FP32 there takes away at least half of what some output is off by, or all that matters."""
        self.tried[lines] = self._judge.errors(0, (*self._kept, *lines))
        return bool(self._helped(lines))

    def _helped(self, lines: tuple[Line, ...]) -> list[str]:
        now = self.tried[lines]
        return [
            name
            for name, error in self.left.items()
            if name in now
            and math.isfinite(now[name])
            and (now[name] < _HELPS * error or self._judge.is_near(0, name, now[name]))
        ]

    def find_later(self, suspect: _Suspect, trace: Trace) -> _Suspect | None:
        """The last line behind a suspect that helps by itself: FP32 there helps what follows it as well."""
        rows = find_candidates([trace])
        places = [(one.file, one.line) for one in rows]
        start = max((places.index(line) for line in suspect.lines if line in places), default=len(rows))
        worst = sorted(rows[start + 1 :], key=lambda one: -_error_at((one.file, one.line), trace))[:_MOST_LATER]
        for finding in sorted(worst, key=lambda one: -places.index((one.file, one.line))):
            lines = ((finding.file, finding.line),)
            if self.help(lines):
                return _Suspect(finding, lines)
        return None

    def settle(self, lines: tuple[Line, ...]) -> str:
        """Keep lines in FP32 that are to blame; gives what came of it, in words."""
        where = ", ".join(dict.fromkeys(str(line) for _, line in lines))
        helped, now = self._helped(lines), self.tried[lines]
        off, was = (say_percent(max(errors[name] for name in helped)) for errors in (now, self.left))
        what = f"{', '.join(helped)} {'is' if len(helped) == 1 else 'are'}" if self._several else "the outputs are"
        self._kept = (*self._kept, *lines)
        self.left = {name: now.get(name, error) for name, error in self.left.items() if name not in helped}
        return f"With line {where} in FP32 {what} {off} off FP32's, and {was} without."


def _error_at(line: Line, trace: Trace) -> float:
    return max((_error(op) for op in trace.ops if (op.file, op.line) == line), default=0.0)


def find_in_cast(evidence: ForwardEvidence) -> list[Finding]:
    """What is to blame where even FP32 throughout does not help: weights, or else inputs, that the cast changes."""
    trace, lost = evidence.trace(0), find_unfit_weights(evidence) or find_lost_weights(evidence)
    if lost or trace is None or evidence.forward is None:
        return lost
    rounded = f"FP32 here is no better: the inputs lose it where they are cast to {evidence.forward.plan.compute}"
    fix = "Give this input in FP32, and cast what is computed of it."
    return [replace(one, seen=f"{one.seen}; {rounded}", fix=fix) for one in find_wrong_results(trace)[:1]]


def _find_suspects(trace: Trace) -> list[_Suspect]:
    rows = [_Suspect(finding, ((finding.file, finding.line),)) for finding in find_wrong_results(trace)]
    rows += [_suspect_choice(op, share, trace) for op, share in find_changed_choices(trace)[:2]]
    likely = [finding for finding in find_candidates([trace]) if finding.cause.id not in UNSURE]
    rows += [_Suspect(finding, ((finding.file, finding.line),)) for finding in likely]
    known: dict[tuple[Line, ...], _Suspect] = {}
    for row in rows:
        if all(file and line for file, line in row.lines):
            known.setdefault(row.lines, row)
    return [*known.values()][:_MOST_TRIED]


def _suspect_choice(op: Op, share: float, trace: Trace) -> _Suspect:
    """A choice that changes: tried with what it chooses by, since an FP32 copy of rounded numbers is no better."""
    made = [maker for operand in op.inputs for maker in ancestors(operand, trace, _FAR)]
    narrow = [maker for maker in made if any(out.dtype in FORMATS for out in maker.outputs)]
    lines = dict.fromkeys((one.file, one.line) for one in (op, *narrow) if one.file and one.line)
    return _Suspect(describe_choice(op, share, op), tuple(lines))


def find_by_island(evidence: ForwardEvidence, island: Island) -> list[Finding]:
    """What is to blame where no suspect was: the lines that a search found, or the worst operation of its modules."""
    trace = evidence.trace(0)
    if trace is None:
        return []
    lines = () if island.lines is None else island.lines.lines
    known = {(one.file, one.line): one for one in find_candidates([trace])}
    for line in lines:
        if line in known:
            return [known[line]]
    ops = [op for op in trace.ops if (op.file, op.line) in lines or _is_in(op.module, island.modules)]
    worst = max(ops, key=_growth, default=None)
    if worst is None or not island.members:
        return []
    seen = f"{base_name(worst.name)} is off by {say_percent(_error(worst))} of its size"
    return [
        describe_birth(Birth(worst, ANY, f"{seen}; with {', '.join(island.modules)} in FP32 the outputs are FP32's"))
    ]


def _is_in(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _error(op: Op) -> float:
    return max((out.error or 0.0 for out in op.outputs), default=0.0)


def _growth(op: Op) -> float:
    return _error(op) - max((operand.value.error or 0.0 for operand in op.inputs), default=0.0)


def find_worse_modules(own: Trace, other: Trace) -> list[str]:
    """Modules whose results are farther from FP32 than in the other format, and by more than rounding; worst first."""
    ours, theirs = _module_errors(own), _module_errors(other)
    worse = [name for name, error in ours.items() if name and error > max(_LOST, 2 * theirs.get(name, math.inf))]
    return sorted(worse, key=lambda name: -ours[name])


def _module_errors(trace: Trace) -> dict[str, float]:
    """The error of the last floating-point numbers that each module made; inf where they are not finite."""
    errors: dict[str, float] = {}
    for op in trace.ops:
        floats = [out for out in op.outputs if out.error is not None and out.dtype.startswith(("float", "bfloat"))]
        if floats:
            errors[op.module] = max(math.inf if out.blown else out.error or 0.0 for out in floats)
    return errors
