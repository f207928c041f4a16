"""Fixes in the user's own source: proposed for a finding, tried on changed texts, kept where they hold. No torch."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from floatline.base.files import write_whole
from floatline.base.texts import on_one_line
from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding

if TYPE_CHECKING:  # libcst takes half a second to import, and a healthy run needs no fix
    from floatline.fixes import CodeFix

# What the source holds, by path, to what a diagnosis of it says; a text is why nothing can be said.
RunChanged = Callable[[Mapping[str, str]], Diagnosis | str]
# The same to what FP32 does; no texts are the source as it is.
RunInFP32 = Callable[[Mapping[str, str]], "FP32Run"]
MOST_RUNS = 4
_MISMATCH = "dtype-mismatch"
# How far FP32's last losses may move: rounding over all steps. Below this share of the first loss they count as 0.
_LAST, _ROUNDING, _CONVERGED = 8, 0.02, 0.05
# A run whose losses end at so many times the first one, or are so many times as large on the way, diverges.
_GROWS, _EXPLODES = 2.0, 100.0


@dataclass(frozen=True)
class FP32Run:
    """A run in FP32.

    Args:
        losses: One for each step; the last is NaN where it raised.
        problem: Why there is no run to compare with; '' where there is one.
    """

    losses: tuple[float, ...] = ()
    problem: str = ""

    @property
    def unsound(self) -> str:
        """Why it is no reference for another run; '' where it is one."""
        if self.problem:
            return self.problem
        if not self.losses:
            return "no optimizer of torch makes a step in FP32"
        if not all(map(math.isfinite, self.losses)):
            return "FP32 itself fails"
        first, end = abs(self.losses[0]), statistics.fmean(self.losses[-_LAST:])
        diverges = end > _GROWS * first or max(self.losses) > _EXPLODES * first
        return f"FP32 itself diverges, from {self.losses[0]:.4g} to {end:.4g}" if first and diverges else ""


def try_fixes(
    diagnosis: Diagnosis,
    run: RunChanged,
    *,
    root: Path,
    say: Callable[[str], None],
    in_fp32: RunInFP32 | None = None,
) -> Diagnosis:
    """The diagnosis with a fix of the user's line that was tried; where none holds, it says what was tried.

    Each change that is known for the primary finding is tried. Where it takes that finding away and another one
    appears, the change for that one is made as well.

    Args:
        diagnosis: As it was found.
        run: Diagnoses changed texts.
        root: Folder that the patch is applied in.
        say: Told what is tried.
        in_fp32: Runs changed texts in FP32, which is compared; None where diagnoses hold FP32's losses themselves.
    """
    primary = diagnosis.primary
    if primary is None:
        return diagnosis
    trials = _Trials(diagnosis, run, root, say, in_fp32)
    for changes in itertools.chain(([first] for first in _find_changes(primary, root)), trials.waiting):
        found = trials.follow(changes)
        if found is None:
            continue
        fixes, result = found
        fixes = _merge(fixes)
        if isinstance(result, str):
            return _with_fix(diagnosis, fixes, f"This change was not tried: {result}.", holds=False)
        ways = "With this change" if len(fixes) == 1 else f"With these {len(fixes)} changes"
        return _with_fix(diagnosis, fixes, f"{ways} {result.target} is healthy: {result.notes[0]}.{trials.uncompared}")
    return _replace_primary(diagnosis, replace(primary, tried=trials.words))


class _Trials:
    """Runs changes, MOST_RUNS in all."""

    def __init__(
        self,
        diagnosis: Diagnosis,
        run: RunChanged,
        root: Path,
        say: Callable[[str], None],
        in_fp32: RunInFP32 | None,
    ) -> None:
        self._before, self._run, self._root, self._say, self._in_fp32 = diagnosis, run, root, say, in_fp32
        self.uncompared = ""  # what is said where a change holds and nobody knows what it does to FP32
        self._left = MOST_RUNS
        self.waiting: list[list[CodeFix]] = []
        self._failed: list[str] = []
        self._num_untried = 0

    def follow(self, changes: Sequence[CodeFix]) -> tuple[list[CodeFix], Diagnosis | str] | None:
        """Try changes, and the changes for what appears behind them; None where they do not help.

        Where formats do not match after a change, it is at fault itself: another one may keep them, and goes first.
        """
        first, fixes, result = changes[0], [*changes], None
        while self._left:
            self._left -= 1
            self._say(f"trying {_list(_merge(fixes))}")
            sources = {str(file): after for file, (_, _, after) in _texts(fixes).items()}
            result = self._run(sources)
            if not isinstance(result, str) and result.verdict == "healthy" and not self._keeps_fp32(result, sources):
                self._failed.append(f"{on_one_line(first.new_code)} changes what FP32 computes")
                return None
            if isinstance(result, str) or result.verdict == "healthy":
                return fixes, result
            following = self._find_next(result, fixes)
            if following is None:
                self._failed.append(f"{on_one_line(first.new_code)} does not help: {_say_result(result)}")
                return None
            fixes.append(following)
            if len(fixes) == 2 and self._mismatches(result):
                self.waiting.append(fixes)
                return None
        self._num_untried += 1
        if result is not None:
            self._failed.append(f"{on_one_line(first.new_code)} alone does not help: {_say_result(result)}")
        return None

    def _keeps_fp32(self, result: Diagnosis, sources: Mapping[str, str]) -> bool:
        before = self._before
        if self._in_fp32 is None or not _is_reference(before):
            return keeps_fp32(before, result)
        self._say("comparing FP32 with and without it")
        old = self._in_fp32({})
        new = self._in_fp32(sources) if not old.unsound else old
        problem = old.unsound or new.problem
        self.uncompared = f" FP32's result was not compared: {problem}." if problem else ""
        if problem or len(old.losses) != len(new.losses):
            return bool(problem)
        return keeps_fp32(replace(before, fp32_losses=old.losses), replace(result, fp32_losses=new.losses))

    def _mismatches(self, result: Diagnosis) -> bool:
        found = [one.primary.cause.id if one.primary is not None else "" for one in (self._before, result)]
        return found[0] != _MISMATCH == found[1]

    def _find_next(self, result: Diagnosis, fixes: Sequence[CodeFix]) -> CodeFix | None:
        """The change for what is left, where that is something else."""
        left = result.primary
        if left is None or not left.file:
            return None
        if any((fix.file.name, fix.line) == (Path(left.file).name, left.line) for fix in fixes):
            return None
        known = _texts(fixes).get(Path(left.file).resolve())
        return next(_find_changes(left, self._root, text=None if known is None else known[2]), None)

    @property
    def words(self) -> str:
        """What did not help, and how many changes were not tried; '' where none is known."""
        failed = f"{'; '.join(self._failed)}." if self._failed else ""
        if not self._num_untried:
            return failed
        left = "1 more change was" if self._num_untried == 1 else f"{self._num_untried} more changes were"
        return f"{failed} {left} not tried."


def _find_changes(finding: Finding, root: Path, *, text: str | None = None) -> Iterator[CodeFix]:
    """The changes that are known for a finding, each once."""
    from floatline.fixes import find_fixes

    seen: set[str] = set()
    for fix in find_fixes(finding, root=root, text=text):
        if fix.after not in seen and fix.after != fix.before:
            seen.add(fix.after)
            yield fix


def _texts(fixes: Sequence[CodeFix]) -> dict[Path, tuple[str, str, str]]:
    """Name in the patch, text before and text after all changes, by file."""
    found: dict[Path, tuple[str, str, str]] = {}
    for fix in fixes:
        path = fix.file.resolve()
        name, before, _ = found.get(path, (fix.name, fix.before, ""))
        found[path] = (name, before, fix.after)
    return found


def keeps_fp32(before: Diagnosis, after: Diagnosis) -> bool:
    """Whether FP32 ends with the loss that it had; True where FP32 fails by itself, or where nobody looked.

    Args:
        before: As it was found.
        after: With a change.
    """
    old, new = before.fp32_losses, after.fp32_losses
    if not _is_reference(before) or not old or not new:
        return True
    ends = [statistics.fmean(losses[-_LAST:]) for losses in (old, new)]
    return abs(ends[1] - ends[0]) <= _ROUNDING * max(abs(ends[0]), abs(old[0]) * _CONVERGED)


def _is_reference(before: Diagnosis) -> bool:
    """Whether FP32 does what it should, so that a change must leave it alone."""
    primary = before.primary
    own_fault = primary is not None and primary.cause.family == "not-precision"
    return not own_fault and not before.fails_in_fp32


def _say_result(result: Diagnosis) -> str:
    left = result.primary
    if left is None:
        return result.unexplained or result.no_verdict
    return f"{left.cause.id} at {Path(left.where).name}"


def _spell(fixes: Sequence[CodeFix]) -> str:
    """The new code as it can be copied; of several changes one line with their places, if they have one line each."""
    if len(fixes) == 1:
        return fixes[0].new_code
    codes = [fix.new_code for fix in fixes]
    if not any("\n" in code for code in codes):
        return _list(fixes)
    return "\n".join(f"# {fix.file.name}:{fix.line}\n{code}" for fix, code in zip(fixes, codes, strict=True))


def _list(fixes: Sequence[CodeFix]) -> str:
    """The first new line, or those of several changes with their places."""
    if len(fixes) == 1:
        return on_one_line(fixes[0].new_code)
    return "; ".join(f"{fix.file.name}:{fix.line}: {on_one_line(fix.new_code)}" for fix in fixes)


def _merge(fixes: Sequence[CodeFix]) -> list[CodeFix]:
    from floatline.fixes.code_fix import merge_fixes

    return merge_fixes(fixes)


def _with_fix(diagnosis: Diagnosis, fixes: Sequence[CodeFix], tried: str, *, holds: bool = True) -> Diagnosis:
    from floatline.fixes.code_fix import draw_diff

    code = _spell(fixes)
    patch = "".join(draw_diff(*texts) for texts in _texts(fixes).values()) if holds else ""
    found = _replace_primary(diagnosis, replace(diagnosis.findings[0], fix=code, patch=patch, tried=tried))
    return replace(found, fixes=tuple(fixes)) if holds else found


def write_fix(diagnosis: Diagnosis) -> str:
    """Change the files as a diagnosis found that it holds; gives what was done, as a line."""
    changes = _texts(diagnosis.fixes)
    if not changes:
        return "no file was changed: no change of the source is known that holds."
    for path, (_, before, _) in changes.items():
        if path.read_bytes() != before.encode("utf-8"):
            return f"no file was changed: {path} is not what it was when the change was tried. Run diagnose again."
    for path, (_, _, after) in changes.items():
        write_whole(path, after)
    return f"changed {', '.join(map(str, changes))}."


def _replace_primary(diagnosis: Diagnosis, primary: Finding) -> Diagnosis:
    return replace(diagnosis, findings=(primary, *diagnosis.findings[1:]))
