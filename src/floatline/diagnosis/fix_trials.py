"""Fixes in the user's own source: proposed for a finding, tried on changed texts, kept where they hold. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from floatline.base.files import write_whole
from floatline.causes import find_cause
from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding
from floatline.fixes import CodeFix, find_fixes
from floatline.fixes.code_fix import draw_diff

# What the source holds, by path, to what a diagnosis of it says; a text is why nothing can be said.
RunChanged = Callable[[Mapping[str, str]], Diagnosis | str]
MOST_RUNS = 4
LIMIT = 300.0  # seconds of one run
# How far FP32's last losses may move: rounding over all steps. Below this share of the first loss they count as 0.
_LAST, _ROUNDING, _CONVERGED = 8, 0.02, 0.05


def try_fixes(diagnosis: Diagnosis, run: RunChanged, *, root: Path, say: Callable[[str], None]) -> Diagnosis:
    """The diagnosis with a fix of the user's line that was tried; where none holds, it says what was tried.

    Each change that is known for the primary finding is tried. Where it takes that finding away and another one
    appears, the change for that one is made as well.

    Args:
        diagnosis: As it was found.
        run: Diagnoses changed texts.
        root: Folder that the patch is applied in.
        say: Told what is tried.
    """
    primary = diagnosis.primary
    if primary is None:
        return diagnosis
    left = MOST_RUNS
    failed: list[str] = []
    for first in _different(find_fixes(primary, root=root)):
        fixes = [first]
        while left:
            left -= 1
            say(f"trying {first.new_code}")
            result = run({str(file): after for file, (_, _, after) in _texts(fixes).items()})
            if isinstance(result, str):
                return _with_fix(diagnosis, fixes, f"This change was not tried: {result}.", holds=False)
            if _is_healthy(result) and not keeps_fp32(diagnosis, result):
                failed.append(f"{first.new_code} changes what FP32 computes")
                break
            if _is_healthy(result):
                ways = "With this change" if len(fixes) == 1 else f"With these {len(fixes)} changes"
                return _with_fix(diagnosis, fixes, f"{ways} {result.target} is healthy: {result.notes[0]}.")
            following = _find_next(result, fixes, root)
            if following is None:
                failed.append(f"{first.new_code} does not help: {_say_result(result)}")
                break
            fixes.append(following)
    tried = f"{'; '.join(failed)}." if failed else ""
    return _replace_primary(diagnosis, replace(primary, tried=tried))


def _different(fixes: Iterator[CodeFix]) -> Iterator[CodeFix]:
    seen: set[str] = set()
    for fix in fixes:
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


def _find_next(result: Diagnosis, fixes: Sequence[CodeFix], root: Path) -> CodeFix | None:
    """The change for what is left, where that is something else."""
    left = result.primary
    if (
        left is None
        or not left.file
        or any((fix.file.name, fix.line) == (Path(left.file).name, left.line) for fix in fixes)
    ):
        return None
    known = _texts(fixes).get(Path(left.file).resolve())
    return next(_different(find_fixes(left, root=root, text=None if known is None else known[2])), None)


def _is_healthy(result: Diagnosis) -> bool:
    return result.verdict == "healthy"


def keeps_fp32(before: Diagnosis, after: Diagnosis) -> bool:
    """Whether FP32 ends with the loss that it had; True where FP32 fails by itself, or where nobody looked.

    Args:
        before: As it was found.
        after: With a change.
    """
    primary = before.primary
    own_fault = primary is not None and primary.cause.family == "not-precision"
    old, new = before.fp32_losses, after.fp32_losses
    if own_fault or before.fails_in_fp32 or not old or not new:
        return True
    ends = [statistics.fmean(losses[-_LAST:]) for losses in (old, new)]
    return abs(ends[1] - ends[0]) <= _ROUNDING * max(abs(ends[0]), abs(old[0]) * _CONVERGED)


def _say_result(result: Diagnosis) -> str:
    left = result.primary
    if left is None:
        return result.unexplained or result.no_verdict
    return f"{left.cause.id} at {Path(left.where).name}"


def _with_fix(diagnosis: Diagnosis, fixes: Sequence[CodeFix], tried: str, *, holds: bool = True) -> Diagnosis:
    code = " and ".join(fix.new_code for fix in fixes)
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


def read_finding(entry: Mapping[str, Any]) -> Finding:
    """A finding from the JSON that one is written as."""
    names = ("seen", "fix", "module", "file", "line", "op")
    return Finding(find_cause(entry["cause"]), **{name: entry[name] for name in names})


def run_quietly(words: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
    """Run a process and whatever it starts, without its output; gives why it came to no end, '' where it did."""
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*words], **quiet, start_new_session=True, env=None if env is None else dict(env))
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return f"it took longer than {LIMIT:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return ""
