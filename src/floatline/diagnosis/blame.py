"""Blame: which line of a script, kept in FP32, brings FP32's results back. Without torch."""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from floatline.base.patched_sources import read_source
from floatline.base.texts import percent
from floatline.causes import find_cause
from floatline.diagnosis.beside_fp32 import Beside
from floatline.diagnosis.gaps import Gap, Shown, find_line_gaps, measure_line, measure_loss_gap, share_like
from floatline.findings import Finding

Line = tuple[str, int]

ANY = "changed-in-16-bits"
CHOICE = "choice-flipped"
# What a line is called by what comes of it: nothing says yet that it is to blame.
UNSURE = frozenset({ANY, CHOICE})

# Lines are to blame if FP32 there takes away this much of what is apart.
_HELPS = 0.5
# Of what all lines take away, a row that holds the one to blame takes away this much: less may be chance.
_NEARLY_ALL = 0.85
# What goes wrong where numbers are read that were rounded before; the last of these is the fault of who rounds them.
_BEARS_NO_ROUNDING = frozenset({"rounded-onto-singularity", "cancellation", "integer-not-exact"})
_OF_THE_ROUNDING = "integer-not-exact"
# Of so many lines that follow.
_FEW_LINES = 3
# What no line computes: gradients that a loss scale is missing for.
UNTRIED = frozenset({"gradient-underflow"})
# What a script keeps from step to step, and can be kept in FP32 by itself.
_STATES = ("optimizer-state-underflow", "accumulator-stagnation")
# So many suspects are tried one by one.
_SINGLY = 3
# And so many lines that make what FP32 chooses otherwise by: halving would end where their numbers were rounded first.
_CHOICES = 2
# What is not finite in 16 bits is finite with a line in FP32, and still apart: what made inf is gone.
_FINITE_AGAIN = 0.6
# How much likelier a line with a known cause is to be to blame than another.
_KNOWN = 6.0
# Seconds after which no further trial begins.
_LIMIT = 300.0


@dataclass(frozen=True)
class Blamed:
    """What trials came to.

    Args:
        finding: About the line that is to blame; None where none is.
        note: What was tried, in words.
    """

    finding: Finding | None
    note: str


class Blame:
    """Tries lines of a script in FP32, each in a run of its own, and holds it against FP32.

    Args:
        beside: What is apart, and by how much.
        fp32: What the script shows in FP32.
        run: Runs it with some lines in FP32; gives a text where that cannot be done.
    """

    def __init__(self, beside: Beside, fp32: Shown, run: Callable[[Sequence[Line]], Shown | str]) -> None:
        self._beside, self._fp32, self._run = beside, fp32, run
        self._began = time.perf_counter()
        self._known: dict[tuple[Line, ...], float] = {}
        self.num_runs = 0

    def find(self, suspects: Sequence[Finding], candidates: Sequence[Finding], *, source: str = "") -> Blamed:
        """What is to blame.

        Suspects are tried one by one, then candidates that a cause is known for. Where none helps, the candidates are
        halved: a line in FP32 helps those that follow it, since they read FP32 of it. So the shortest row is looked for
        that ends with the last one and helps, and its first line is to blame. Where all of them make it worse, as of a
        model that is half in FP32 and half not, those outside of modules are tried one by one.

        Args:
            suspects: What may do harm, the surest first.
            candidates: One for each line that is known to give 16 bits, in the order in which they run.
            source: A file whose lines are halved, in their order, where no candidate helps: not all of what a script
                does was looked into. '' halves none.
        """
        first, rows = _one_for_each_line(suspects), _one_for_each_line(candidates)
        sure = [one for one in first if one.cause.id not in UNSURE][:_SINGLY]
        likely = [one for one in [*first, *rows] if one not in sure and (one in first or one.cause.id not in UNSURE)]
        choices = [one for one in rows if one.cause.id == CHOICE][-_CHOICES:]
        if found := self._try_singly(_one_for_each_line([*sure, *_one_for_each_line(likely)[:_SINGLY], *choices])):
            return found
        halved = self._halve(rows)
        worsens = halved is None and bool(rows) and not self._is_late and self._help(rows) < 0.0
        if worsens and (found := self._try_singly([one for one in rows if not one.module][:_SINGLY])):
            return found
        halved = halved or self._halve(_statements_of(source))
        if halved is None:
            late = f" in {_LIMIT:g} s" if self._is_late else ""
            return Blamed(None, f"{self.num_runs} runs with lines in FP32{late} did not bring FP32's results back")
        words = f"what is apart is gone with line {halved.line} and all that runs after it in FP32, and not without it"
        return Blamed(_name_by_next(halved, rows), words)

    def _try_singly(self, findings: Sequence[Finding]) -> Blamed | None:
        """The first that helps by itself; gradients that are lost, which no line helps, if no state after them does."""
        untried: Finding | None = None
        for finding in findings:
            if self._is_late:
                break
            if finding.cause.id in UNTRIED:
                untried = untried or (finding if self._beside.is_apart else None)  # they change what is learnt
                continue
            if untried is not None and finding.cause.id not in _STATES:
                continue
            helps = self._help([finding])
            if helps > _HELPS:
                return Blamed(finding, f"with line {finding.line} in FP32, {percent(helps)} of what is apart is gone")
        return None if untried is None else Blamed(untried, "")

    def _halve(self, rows: Sequence[Finding]) -> Finding | None:
        """The first of the shortest row, up to the last, that helps in FP32; None where not even all do."""
        most = -math.inf if self._is_late or not rows else self._help(rows)
        if most < _HELPS:
            return None
        least = max(_HELPS, _NEARLY_ALL * most)
        first, beyond = 0, len(rows)  # from the one it helps, from the other on it does not
        while beyond - first > 1 and not self._is_late:
            middle = _split(rows, first, beyond)
            first, beyond = (middle, beyond) if self._help(rows[middle:]) > least else (first, middle)
        return rows[first] if beyond - first == 1 else None

    @property
    def _is_late(self) -> bool:
        return time.perf_counter() - self._began > _LIMIT

    def _help(self, findings: Sequence[Finding]) -> float:
        """The share of what is apart that is gone with their lines in FP32; below 0 where it is worse."""
        lines = tuple((finding.file, finding.line) for finding in findings)
        if lines not in self._known:
            self._known[lines] = self._measure(lines)
        return self._known[lines]

    def _measure(self, lines: Sequence[Line]) -> float:
        self.num_runs += 1
        shown = self._run(lines)
        if isinstance(shown, str) or shown.error:
            return -math.inf
        if self._beside.num_steps is not None:
            own, fp32 = self._beside.num_steps
            return (len(shown.losses) - own) / (fp32 - own)
        if self._beside.is_apart and self._beside.gap is not None:
            floor = self._beside.floor.spread if self._beside.floor is not None else 0.0
            left = measure_loss_gap(shown, self._fp32)
            return _gone(self._beside.gap, floor, [] if left is None else [left])
        kept: Mapping[str, Gap] = self._beside.lines
        line, gap = next(iter(kept.items()))
        if not math.isfinite(gap.share):
            if line not in find_line_gaps(shown, self._fp32):
                return 1.0
            return _FINITE_AGAIN if _are_finite(shown.lines.get(line, ())) else 0.0
        return _gone(gap, self._beside.floors.get(line, 0.0), measure_line(line, shown, self._fp32))


def _are_finite(values: Sequence[float]) -> bool:
    return bool(values) and all(map(math.isfinite, values))


def name_own_line(found: Finding, candidates: Sequence[Finding]) -> Finding:
    """What a library's line gives is named at the first line of the user's own that runs after it, if there is one.

    Args:
        found: About the line that is to blame.
        candidates: In the order in which they run.
    """
    places = [(one.file, one.line) for one in candidates]
    if not is_installed(found.file) or (found.file, found.line) not in places:
        return found
    after = candidates[places.index((found.file, found.line)) + 1 :]
    own = next((one for one in after if not is_installed(one.file)), None)
    if own is None:
        return found
    there = f"{found.seen}, in {'/'.join(Path(found.file).parts[-2:])}:{found.line}; this line is the next of yours"
    return replace(found, seen=there, file=own.file, line=own.line, module=own.module, op=own.op)


def is_installed(file: str) -> bool:
    """Whether a file is a library's."""
    return "site-packages" in file or "dist-packages" in file


def _split(rows: Sequence[Finding], first: int, beyond: int) -> int:
    """Where a row is halved: in two parts that are equally likely to hold the one to blame."""
    weights = [_KNOWN if rows[i].cause.id not in UNSURE else 1.0 for i in range(first, beyond)]
    halves = [abs(sum(weights[:i]) - sum(weights[i:])) for i in range(1, len(weights))]
    return first + 1 + halves.index(min(halves))


def _gone(gap: Gap, floor: float, left: Sequence[Gap]) -> float:
    """The share of a gap that is gone: what a nudge of FP32's weights does as well is no part of it."""
    share = share_like(gap, left)
    return -math.inf if share is None else 1.0 - max(0.0, share - floor) / max(gap.share - floor, 1e-30)


def _name_by_next(found: Finding, rows: Sequence[Finding]) -> Finding:
    """What a line rounds is named by the operation after it that cannot bear it, if that is known.

    The next line reads it. One further on, within a few, reads what several lines round, as the difference of a mean
    of squares and a squared mean does: that is where to begin. But of positions or phases that were rounded before
    their sine is taken it is the line that rounded them.
    """
    places = [(one.file, one.line) for one in rows]
    if found.cause.id not in UNSURE or (found.file, found.line) not in places:
        return found
    after = rows[places.index((found.file, found.line)) + 1 :][:_FEW_LINES]
    for distance, one in enumerate(after):
        if one.cause.id in _BEARS_NO_ROUNDING and one.file == found.file:
            if distance and one.cause.id != _OF_THE_ROUNDING:
                return replace(one, seen=f"{one.seen}; what it reads is rounded from line {found.line} on")
            seen = f"line {one.line} reads what this line rounds: {one.seen}"
            return replace(found, cause=one.cause, seen=seen, fix=one.fix, patch="", tried="")
    return found


def _statements_of(source: str) -> list[Finding]:
    """A finding for each statement of a file, in their order; none where it cannot be read."""
    try:
        tree = ast.parse(read_source(Path(source))) if source else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return []
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.expr))}
    cause = find_cause(ANY)
    seen = "what this line computes in 16 bits was not looked into"
    return [Finding(cause, seen, cause.advice, file=source, line=line) for line in sorted(lines)]


def _one_for_each_line(findings: Sequence[Finding]) -> list[Finding]:
    found: dict[Line, Finding] = {}
    for finding in findings:
        if finding.file and finding.line:
            found.setdefault((finding.file, finding.line), finding)
    return [*found.values()]
