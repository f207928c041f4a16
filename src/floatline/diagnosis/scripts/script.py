"""diagnose_script: a whole script runs as it is, in a process of its own, and is explained. Without torch."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from floatline.causes import Family
from floatline.diagnosis.beside_fp32 import (
    DIVERGENCE,
    Beside,
    StepErrors,
    compare_with_fp32,
    keep_steady,
    look_closer,
    stays_sound,
)
from floatline.diagnosis.blame import ANY, Blame, Line, name_own_line
from floatline.diagnosis.fix_trials import read_finding, try_fixes
from floatline.diagnosis.gaps import Shown
from floatline.diagnosis.result import Diagnosis
from floatline.diagnosis.scripts.fp32_runs import LOSSES, MAIN, READS, STEPS, WHOLE, FP32Runs
from floatline.errors import TargetError
from floatline.findings import Finding
from floatline.running.command import Command, parse_command, trial_environment
from floatline.running.quiet_runs import QuietRuns

_MAIN = "floatline.diagnosis.scripts.main"


@dataclass(frozen=True, kw_only=True)
class ScriptDiagnosis(Diagnosis):
    """What a script's training suffers from.

    Args:
        exit_code: The script's own.
    """

    exit_code: int = 0

    @property
    def status(self) -> int:
        """The exit code of the command: 2 without a verdict; else the script's own, or 1 where something is wrong."""
        return 2 if self.verdict == "no-verdict" else self.exit_code or super().status

    def as_json(self) -> dict[str, Any]:
        """The fields of the command-line contract, and what only a script has."""
        own = {"exit_code": self.exit_code, "unexplained": self.unexplained, "notes": list(self.notes)}
        return super().as_json() | own


def diagnose_script(
    words: Sequence[str],
    *,
    trace_path: str | None = None,
    keep_stdout: bool = False,
    as_device: Literal["cuda"] | None = None,
    tries_fixes: bool = False,
    fp32_steps: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ScriptDiagnosis:
    """Run a command and name what its training suffers from.

    The script runs as it is, in its own process. Its input and output are its own; random numbers that it does not seed
    itself begin from 0. Where nothing is found, it runs again in FP32 for some steps, its output is not shown, and what
    it writes is kept apart: only a script whose losses are those of FP32 is healthy.

    Args:
        words: The command: 'python', 'train.py' and so on.
        trace_path: Where to keep the trace of the step that was looked into.
        keep_stdout: Whether what the script prints goes to stderr.
        as_device: 'cuda' runs a script that is written for a GPU on the CPU, as a GPU would, where there is none.
        tries_fixes: Whether changes of its source are tried: the script then runs again for some steps, its output is
            not shown, and what it writes is kept apart.
        fp32_steps: Steps of the run in FP32; 0 makes none, and then no script in 16 bits is called healthy. None: 100,
            or all of a script of up to 250, which says at its end what came of them.
        on_progress: Told what is tried.

    Raises:
        TargetError: The command runs no Python code.
    """
    command = parse_command(list(words))
    began, say, device = time.perf_counter(), on_progress or _say_nothing, as_device or ""
    with QuietRuns(command, (MAIN, _MAIN)) as quiet:
        trace = str(Path(trace_path).absolute()) if trace_path else ""
        settings = (trace, device, "", str(WHOLE if fp32_steps is None else fp32_steps))
        seen, own, code = _run_as_it_is(command, quiet, settings, keep_stdout=keep_stdout)
        found = read_report(" ".join(words), seen, code, time.perf_counter() - began)
        runs = FP32Runs(command, quiet, device, _bound(fp32_steps, seen), say, search=_search_of(seen))
        was_silent = bool(seen) and seen["is_narrow"] and is_silent(found, seen)
        if was_silent:
            found = _look_beside(found, seen, own, None if fp32_steps == 0 else runs)
        elif found.verdict == "not-precision" and seen["is_narrow"] and fp32_steps != 0 and _is_doubtful(found, seen):
            found = _check_blame(found, seen, own, runs)
        if tries_fixes and found.primary is not None:
            tries = _Tries(quiet, device, _count_steps(found.primary.cause.family, seen), runs, was_silent)
            found = tries.try_fixes(found, say)
    return replace(found, seconds=time.perf_counter() - began)


def _bound(fp32_steps: int | None, seen: Mapping[str, Any]) -> int:
    """Steps after which a run in FP32 is ended: where none are asked for, all of a script that has not too many."""
    if fp32_steps is not None:
        return fp32_steps or _AT_LEAST
    return max(STEPS, num if (num := seen.get("num_steps", 0)) <= WHOLE else 0)


def _search_of(seen: Mapping[str, Any]) -> Sequence[Sequence[int]]:
    """Steps that FP32 leaves out as well: none where a schedule went on in them, which is what may have done harm."""
    is_ahead = any(entry["cause"] == "scheduler-vs-skipped-step" for entry in seen.get("suspects", ()))
    return () if is_ahead else seen.get("search", ())


def _run_as_it_is(
    command: Command, quiet: QuietRuns, settings: Sequence[str], *, keep_stdout: bool
) -> tuple[dict[str, Any], Shown, int]:
    """The script's report, {} where there is none; what it showed; and the exit code of its process."""
    with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
        report = Path(folder) / "report.json"
        code = quiet.run_aloud(_MAIN, str(report), *settings, keep_stdout=keep_stdout)
        seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        own = Shown.read(report.with_name(LOSSES), report.with_name(READS))
    if "missing" in seen:
        raise TargetError(
            f"{command.python} cannot import {seen['missing']}, which floatline needs there. Install it, or give the "
            f"interpreter that has it by its path; floatline itself runs in {sys.executable}."
        )
    return seen, own, code


def _say_nothing(_text: str) -> None:
    pass


def is_silent(found: ScriptDiagnosis, seen: Mapping[str, Any]) -> bool:
    """Whether nothing fails in a run that came to its end: what is wrong with it, only FP32 tells, or confirms."""
    if found.exit_code or found.unexplained or seen["fails"] or found.verdict == "not-precision":
        return False
    return found.primary is None or (found.primary.cause.family not in ("loop", "dtypes") and bool(found.primary.line))


def _look_beside(found: ScriptDiagnosis, seen: Mapping[str, Any], own: Shown, runs: FP32Runs | None) -> ScriptDiagnosis:
    """The diagnosis of a script that does not fail, after it ran again in FP32; None does not run it.

    What was found already stays, also where nothing is apart: not all that a script learns is seen from outside.
    """
    keep = bool(found.findings or found.no_verdict)
    looked = f"nothing loud in {seen['num_steps']:,} steps, {seen['num_recorded']} of them looked into"
    if runs is None:
        return found if keep else replace(found, no_verdict=f"{looked}; FP32 was not run beside it")
    losses, gradients = seen["step_errors"]
    errors = StepErrors({int(step): error for step, error in losses.items()}, gradients)
    beside = compare_with_fp32(own, runs.nudged, errors)
    if beside.is_only_printed:
        beside = keep_steady(beside, own, runs.in_part([]))
    if beside.apart:
        return _blame_a_line(found, seen, beside, runs)
    known = [one for name in _WITH_CAUSES for one in seen[name] if name != "candidates" or one["cause"] != ANY]
    if known and (closer := look_closer(beside, own, runs.nudged)) is not None:
        blamed = _blame_a_line(found, seen, closer, runs, if_it_helps=True)
        if blamed.findings != found.findings:
            return blamed
    if beside.reason and not keep:
        return replace(found, no_verdict=f"{looked}; FP32 could not be compared: {beside.reason}")
    return found if keep else replace(found, notes=(*found.notes, beside.together))


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
    suspects = [*found.findings, *(read_finding(entry) for name in order for entry in seen[name])]
    found = replace(found, findings=(), no_verdict="")
    fp32 = runs.nudged(0.0)
    if isinstance(fp32, str):
        return replace(found, unexplained=beside.apart, fails_in_fp32=False)
    if suspects and suspects[0].cause.family == "loop":  # no line computes it
        return replace(found, findings=(replace(suspects[0], seen=f"{suspects[0].seen}; {beside.apart}"),))
    sure = [one for one in suspects if one.cause.id != ANY]
    candidates = [read_finding(entry) for entry in seen["candidates"]]
    tried, source = (candidates, runs.source)
    if if_it_helps:
        tried, source = [one for one in candidates if one.cause.id != ANY], ""
    blamed = Blame(beside, fp32, runs.in_part).find(suspects, tried, source=source)
    if if_it_helps and blamed.finding is None:
        return before
    first = blamed.finding or next(iter(sure), None)
    if first is not None:  # what was seen as well names the user's own line where a library makes the step
        first = next((one for one in sure if one.cause.id == first.cause.id), name_own_line(first, candidates))
    notes = (*found.notes, blamed.note) if blamed.note else found.notes
    if first is None:
        return replace(found, unexplained=beside.apart, fails_in_fp32=False, notes=notes)
    others = [one for one in suspects if (one.file, one.line) != (first.file, first.line)]
    first = replace(first, seen=f"{first.seen}; {beside.apart}")
    return replace(found, findings=(first, *others), fails_in_fp32=False, notes=notes)


def _is_doubtful(found: ScriptDiagnosis, seen: Mapping[str, Any]) -> bool:
    """Whether FP32 was only computed beside recorded steps of a run that fails or diverges."""
    return found.primary is not None and (seen["fails"] or found.primary.cause.id == DIVERGENCE)


def _check_blame(found: ScriptDiagnosis, seen: Mapping[str, Any], own: Shown, runs: FP32Runs) -> ScriptDiagnosis:
    """The diagnosis of a script that is said to fail in FP32, too, after it ran again in FP32."""
    fp32 = runs.nudged(0.0)
    if found.primary is not None and found.primary.cause.id == DIVERGENCE and (why := _why_unseen(fp32)):
        unseen = f"the loss grows, and whether it does in FP32 is not known: {why}"
        return replace(found, findings=(), no_verdict=unseen, fails_in_fp32=False)
    apart = "" if isinstance(fp32, str) else stays_sound(own, fp32, first_bad=seen["first_bad_step"])
    if not apart:
        return found
    suspects = [read_finding(entry) for entry in seen["suspects"]]
    if not isinstance(fp32, str) and (first := _find_before_failure(found, seen, own, fp32, runs)) is not None:
        return replace(found, findings=(replace(first, seen=f"{first.seen}; {apart}"), *suspects))
    if not suspects:
        beside, found = compare_with_fp32(own, runs.nudged), replace(found, findings=())
        blamed = _blame_a_line(found, seen, beside, runs) if beside.apart else found
        return blamed if blamed.findings else replace(found, unexplained=apart, fails_in_fp32=False)
    return replace(found, findings=(replace(suspects[0], seen=f"{suspects[0].seen}; {apart}"), *suspects[1:]))


def _find_before_failure(
    found: ScriptDiagnosis, seen: Mapping[str, Any], own: Shown, fp32: Shown, runs: FP32Runs
) -> Finding | None:
    """What lets a run go astray that does not in FP32, long before something overflows; None where no line does."""
    num = len(own.until_failure().losses)
    if found.primary is None or found.primary.cause.id != DIVERGENCE or num >= len(fp32.losses):
        return None

    def run(lines: Sequence[Line]) -> Shown | str:
        shown = runs.in_part(lines)
        return shown if isinstance(shown, str) else shown.until_failure()

    beside = Beside(num_steps=(num, len(fp32.losses)))
    candidates = [read_finding(entry) for entry in seen["candidates"]]
    return Blame(beside, fp32, run).find([], candidates).finding


def _why_unseen(fp32: Shown | str) -> str:
    """Why nothing is known of FP32; '' where something is: an error is something, too."""
    if isinstance(fp32, str):
        return fp32
    return "" if fp32.losses or fp32.error else "no loss was seen there"


_AT_LEAST, _MORE = 40, 20  # steps of a trial


def _count_steps(family: Family, seen: Mapping[str, Any]) -> int:
    """Steps of a trial: as many as it took to see what is wrong, and some more.

    What is wrong with numbers is seen in a step that was recorded. What is wrong with the loop or the data may happen
    once, in any step of the run.
    """
    known = max(_AT_LEAST, (seen["first_bad_step"] or 0) + _MORE, seen["last_recorded"] + _MORE)
    return max(known, seen["num_steps"]) if family in ("loop", "not-precision") else known


@dataclass(frozen=True)
class _Tries:
    """Tries changed texts of a script.

    Args:
        quiet: Runs it.
        device: As in `diagnose_script`.
        steps: How many.
        runs: What it shows in FP32.
        compares: Whether it must show the same with a change, since what is wrong was seen beside FP32 alone.
    """

    quiet: QuietRuns
    device: str
    steps: int
    runs: FP32Runs
    compares: bool

    def try_fixes(self, found: ScriptDiagnosis, say: Callable[[str], None]) -> ScriptDiagnosis:
        """Changes that are known for what was found, tried; those that hold are kept."""

        def say_again(what: str) -> None:
            say(f"{what}: the script runs again for up to {self.steps} steps, its output is not shown")

        found = replace(found, num_steps=self.steps)
        tried = try_fixes(found, self._diagnose, root=Path.cwd(), say=say_again, in_fp32=self.runs.changed)
        return replace(found, findings=tried.findings, fixes=tried.fixes)

    def _diagnose(self, sources: Mapping[str, str]) -> Diagnosis | str:
        """Diagnose the script again with changed texts, by path; what it writes is kept apart."""
        with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
            report, trial, writes = (Path(folder, name) for name in ("report.json", "trial.json", "writes"))
            writes.mkdir()
            job = {"sources": dict(sources), "steps": self.steps, "folder": str(writes)}
            trial.write_text(json.dumps(job), encoding="utf-8")
            with trial_environment(writes) as env:
                given = ("", self.device, str(trial), str(self.steps))
                problem = self.quiet.run(_MAIN, str(report), *given, env=env)
            seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
            own = Shown.read(report.with_name(LOSSES), report.with_name(READS), cut=True)
        if not seen or "missing" in seen:
            return problem or "the process that tried it ended without a word"
        if seen["refused"]:
            return f"the script cannot run beside its own files, {seen['refused'][0]}"
        found = read_report("the script", seen, seen["exit_code"], 0.0)
        fp32 = self.runs.nudged(0.0) if self.compares and found.verdict == "healthy" else ""
        if not isinstance(fp32, str):
            beside = compare_with_fp32(own, lambda nudge: "not asked" if nudge else fp32)
            if beside.apart:
                return replace(found, unexplained=beside.apart, fails_in_fp32=False)
        num, recorded = seen["num_steps"], seen["num_recorded"]
        return replace(found, notes=(f"{num:,} steps without a finding, {recorded} of them compared with FP32",))


def read_report(text: str, seen: dict[str, Any], code: int, seconds: float) -> ScriptDiagnosis:
    """What the process of a script wrote down, as a diagnosis.

    Args:
        text: The command, as the user wrote it.
        seen: The report; {} where the process ended before it was written.
        code: The exit code of the process, as a shell would have it.
        seconds: How long it took.

    """
    if not seen:
        ended = f"the script {_say_end(code)} before floatline could sum it up"
        return ScriptDiagnosis(text, "", (), seconds, exit_code=code, no_verdict=ended)
    if not seen["num_backward"] and not seen["findings"] and not code:
        unseen = "no backward pass was seen: the command does not train, or takes its gradients by torch.func"
        return ScriptDiagnosis(text, seen["precision"], (), seconds, notes=tuple(seen["notes"]), no_verdict=unseen)
    return ScriptDiagnosis(
        text,
        seen["precision"],
        tuple(read_finding(entry) for entry in seen["findings"]),
        seconds,
        notes=tuple(seen["notes"]),
        exit_code=code,
        unexplained=seen["unexplained"],
        fails_in_fp32=seen["fails_in_fp32"],
        no_verdict="" if seen["unexplained"] else _explain_end(seen, code) or seen["unseen"],
    )


def _explain_end(seen: dict[str, Any], code: int) -> str:
    """Why a script that did not come to its end has no verdict, its own words first; '' for one that did."""
    if not code:
        return ""
    steps = seen["num_steps"]
    after = f"after {steps:,} step{'s' if steps > 1 else ''}" if steps else "before its first step"
    words = seen["exception"].strip().splitlines() or [seen["last_line"]]
    first = words[0].rstrip(" .:")
    said = f"{first}: " if first else ""
    return f"{said}the script {_say_end(code)} {after}"


def _say_end(code: int) -> str:
    """What a shell's exit code says of how a process ended."""
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names[code - 128]}" if code - 128 in names else f"ended with exit code {code}"
