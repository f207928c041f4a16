"""A script held against its own runs in FP32: whether it is apart from them, and which line is to blame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from floatline.base.texts import percent
from floatline.diagnosis.beside_fp32 import (
    DIVERGENCE,
    Beside,
    StepErrors,
    compare_with_fp32,
    keep_steady,
    look_closer,
    stays_sound,
)
from floatline.diagnosis.blame import UNSURE, UNTRIED, Blame, Line, is_installed, name_own_line
from floatline.diagnosis.gaps import Shown
from floatline.diagnosis.lost_decay import LOST, LostDecay
from floatline.diagnosis.scripts.fp32_runs import FP32Runs
from floatline.diagnosis.scripts.script_report import ScriptDiagnosis
from floatline.findings import Finding


def is_silent(found: ScriptDiagnosis, seen: Mapping[str, Any]) -> bool:
    """Whether nothing fails in a run that came to its end: what is wrong with it, only FP32 tells, or confirms."""
    if found.exit_code or found.unexplained or seen["fails"] or found.verdict == "not-precision":
        return False
    return found.primary is None or (found.primary.cause.family not in ("loop", "dtypes") and bool(found.primary.line))


def compare_run(seen: Mapping[str, Any], own: Shown, runs: FP32Runs) -> Beside:
    """A run held against FP32, which a nudge of its weights tells how far it goes apart by itself."""
    losses, gradients = seen["step_errors"]
    errors = StepErrors({int(step): error for step, error in losses.items()}, gradients)
    beside = compare_with_fp32(own, runs.nudged, errors)
    return keep_steady(beside, own, runs.in_part([])) if beside.is_only_printed else beside


def look_beside(found: ScriptDiagnosis, seen: Mapping[str, Any], own: Shown, runs: FP32Runs | None) -> ScriptDiagnosis:
    """The diagnosis of a script that does not fail, after it ran again in FP32; None does not run it.

    What was found already stays, also where nothing is apart: not all that a script learns is seen from outside.
    """
    keep = bool(found.findings or found.no_verdict)
    lost = seen.get("lost_decay")
    decay = None if found.findings or lost is None else LostDecay.read(lost)
    if decay is not None:
        found = replace(found, notes=(*found.notes, f"{decay.finding.seen}; losses need not show it"))
    looked = f"nothing loud in {seen['num_steps']:,} steps, {seen['num_recorded']} of them looked into"
    if runs is None:
        return found if keep else replace(found, no_verdict=f"{looked}; FP32 was not run beside it")
    beside = compare_run(seen, own, runs)
    if beside.apart:
        return _blame_a_line(found, seen, beside, runs)
    known = [one for name in _WITH_CAUSES for one in seen[name] if name != "candidates" or one["cause"] not in UNSURE]
    if known and (closer := look_closer(beside, own, runs.nudged)) is not None:
        blamed = _blame_a_line(found, seen, closer, runs, if_it_helps=True)
        if blamed.findings != found.findings:
            return blamed
    if decay is not None and not keep and (larger := _find_larger(decay, own, runs.nudged(0.0))):
        return replace(found, findings=(replace(decay.finding, seen=larger),), notes=found.notes[:-1])
    if beside.reason and not keep:
        return replace(found, no_verdict=f"{looked}; FP32 could not be compared: {beside.reason}")
    return found if keep else replace(found, notes=(*found.notes, beside.together))


def _find_larger(decay: LostDecay, own: Shown, fp32: Shown | str) -> str:
    """What is told of a decay that is lost, where weights are larger than FP32's for it; '' where they are not."""
    if isinstance(fp32, str):
        return ""
    after = len(fp32.losses)
    own_sizes, sizes = own.sizes.get(after, ()), fp32.sizes.get(after, ())
    if len(own_sizes) != len(sizes) or not any(sizes):
        return ""
    num_steps = after - sum(step < after for step in own.skipped)
    grown = math.hypot(*own_sizes) / math.hypot(*sizes) - 1
    if not decay.shows_in(grown, num_steps):
        return ""
    return f"{decay.finding.seen}; after {num_steps:,} steps they are {percent(grown)} larger than FP32's"


# Where a report has what may do harm.
_WITH_CAUSES = ("suspects", "suspects_beside", "candidates")


def _blame_a_line(
    found: ScriptDiagnosis, seen: Mapping[str, Any], beside: Beside, runs: FP32Runs, *, if_it_helps: bool = False
) -> ScriptDiagnosis:
    """The diagnosis of a script that is apart from FP32: what is to blame, after lines of it ran in FP32.

    Args:
        found: The diagnosis without it.
        seen: The report of the script.
        beside: What is apart.
        runs: Runs it.
        if_it_helps: Whether nothing is blamed but what takes away in FP32 what is apart.
    """
    before = found
    order = ("suspects", "suspects_beside") if beside.is_apart else ("suspects_beside", "suspects")
    suspects = [*found.findings, *(Finding.read(entry) for name in order for entry in seen[name])]
    found = replace(found, findings=(), no_verdict="")
    fp32 = runs.nudged(0.0)
    if isinstance(fp32, str):
        return replace(found, unexplained=beside.apart, fails_in_fp32=False)
    if suspects and suspects[0].cause.family == "loop":  # no line computes it
        return replace(found, findings=(replace(suspects[0], seen=f"{suspects[0].seen}; {beside.apart}"),))
    sure = [one for one in suspects if one.cause.id not in UNSURE]
    if not beside.is_apart:  # gradients that are lost explain no number of a run that learns what FP32 does
        sure = [one for one in sure if one.cause.id not in UNTRIED or one in before.findings]
    candidates = [Finding.read(entry) for entry in seen["candidates"]]
    tried, source = (candidates, runs.source)
    if if_it_helps:
        tried, source = [one for one in candidates if one.cause.id not in UNSURE], ""
    blamed = Blame(beside, fp32, runs.in_part).find(suspects, tried, source=source)
    if if_it_helps and blamed.finding is None:
        return before
    first = blamed.finding or next(iter(sure), None)
    if first is not None and is_installed(
        first.file
    ):  # a library's line: what was seen as well may name the user's own
        first = next((one for one in sure if one.cause.id == first.cause.id), name_own_line(first, candidates))
    notes = (*found.notes, blamed.note) if blamed.note else found.notes
    if first is None:
        return replace(found, unexplained=beside.apart, fails_in_fp32=False, notes=notes)
    others = [one for one in suspects if (one.file, one.line) != (first.file, first.line)]
    if first.cause.id == LOST:
        notes = tuple(note for note in notes if not note.startswith(first.seen))
    first = replace(first, seen=f"{first.seen}; {beside.apart}")
    return replace(found, findings=(first, *others), fails_in_fp32=False, notes=notes)


def is_doubtful(found: ScriptDiagnosis, seen: Mapping[str, Any]) -> bool:
    """Whether FP32 was only computed beside recorded steps of a run that fails or diverges."""
    return found.primary is not None and (seen["fails"] or found.primary.cause.id == DIVERGENCE)


def check_blame(found: ScriptDiagnosis, seen: Mapping[str, Any], own: Shown, runs: FP32Runs) -> ScriptDiagnosis:
    """The diagnosis of a script that is said to fail in FP32, too, after it ran again in FP32."""
    fp32 = runs.nudged(0.0)
    if found.primary is not None and found.primary.cause.id == DIVERGENCE and (why := _why_unseen(fp32)):
        unseen = f"the loss grows, and whether it does in FP32 is not known: {why}"
        return replace(found, findings=(), no_verdict=unseen, fails_in_fp32=False)
    apart = "" if isinstance(fp32, str) else stays_sound(own, fp32, first_bad=seen["first_bad_step"])
    if not apart:
        return found
    suspects = [Finding.read(entry) for entry in seen["suspects"]]
    diverges = found.primary is not None and found.primary.cause.id == DIVERGENCE
    if diverges and not isinstance(fp32, str) and (first := _find_before_failure(seen, own, fp32, runs)) is not None:
        return replace(found, findings=(replace(first, seen=f"{first.seen}; {apart}"), *suspects))
    if not suspects:
        beside, found = compare_with_fp32(own, runs.nudged), replace(found, findings=())
        blamed = _blame_a_line(found, seen, beside, runs) if beside.apart else found
        return blamed if blamed.findings else replace(found, unexplained=apart, fails_in_fp32=False)
    return replace(found, findings=(replace(suspects[0], seen=f"{suspects[0].seen}; {apart}"), *suspects[1:]))


def explain_by_fp32(found: ScriptDiagnosis, seen: Mapping[str, Any], own: Shown, runs: FP32Runs) -> ScriptDiagnosis:
    """The diagnosis of a script that fails in steps that were not recorded, after it ran again in FP32."""
    fp32 = runs.nudged(0.0)
    if isinstance(fp32, str):
        return found
    apart = stays_sound(own, fp32, first_bad=seen["first_bad_step"])
    if not apart:
        is_bad = any(not math.isfinite(loss) for loss in fp32.losses)
        return replace(found, fails_in_fp32=True) if is_bad else found
    first = _find_before_failure(seen, own, fp32, runs)
    if first is None:
        return replace(found, unexplained=f"{found.unexplained}; {apart}", fails_in_fp32=False)
    first = replace(first, seen=f"{first.seen}; {apart}")
    return replace(found, findings=(first,), unexplained="", fails_in_fp32=False)


def _find_before_failure(seen: Mapping[str, Any], own: Shown, fp32: Shown, runs: FP32Runs) -> Finding | None:
    """What lets a run fail that does not in FP32, by lines that ran before it does; None where no line does."""
    num = len(own.until_failure().losses)
    if num >= len(fp32.losses):
        return None

    def run(lines: Sequence[Line]) -> Shown | str:
        shown = runs.in_part(lines)
        return shown if isinstance(shown, str) else shown.until_failure()

    beside = Beside(num_steps=(num, len(fp32.losses)))
    candidates = [Finding.read(entry) for entry in seen["candidates"]]
    return Blame(beside, fp32, run).find([], candidates).finding


def _why_unseen(fp32: Shown | str) -> str:
    """Why nothing is known of FP32; '' where something is: an error is something, too."""
    if isinstance(fp32, str):
        return fp32
    return "" if fp32.losses or fp32.error else "no loss was seen there"
