"""diagnose_script: a whole script runs as it is, in a process of its own, and is explained. Without torch."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from floatline.causes import Family
from floatline.diagnosis.fix_trials import try_fixes
from floatline.diagnosis.gaps import Shown
from floatline.diagnosis.result import Diagnosis
from floatline.diagnosis.scripts.against_fp32 import (
    check_blame,
    compare_run,
    explain_by_fp32,
    is_doubtful,
    is_silent,
    look_beside,
)
from floatline.diagnosis.scripts.fp32_runs import MAIN, MOST_ELEMENTS, MOST_OPS, MOST_STEPS, STEPS, WHOLE, FP32Runs
from floatline.diagnosis.scripts.ranks import RankReports
from floatline.diagnosis.scripts.script_report import ScriptDiagnosis, read_report
from floatline.running.command import Command, parse_launched, pass_on_ending, trial_environment
from floatline.running.quiet_runs import QuietRuns
from floatline.running.ranks import path_of

_MAIN = "floatline.diagnosis.scripts.main"
# Seconds before a first step that are worth a word: several runs follow.
LONG_START = 30.0


def diagnose_script(
    words: Sequence[str],
    *,
    trace_path: str | None = None,
    keep_stdout: bool = False,
    as_device: Literal["cuda"] | None = None,
    tries_fixes: bool = False,
    fp32_steps: int | None = None,
    is_last: bool = True,
    on_progress: Callable[[str], None] | None = None,
    on_start: Callable[[str], None] | None = None,
) -> ScriptDiagnosis:
    """Run a command and name what its training suffers from.

    The script runs as it is, in its own process. Its input and output are its own; random numbers that it does not seed
    itself begin from 0. Where nothing is found, it runs again in FP32 for some steps, its output is not shown, and what
    it writes is kept apart: only a script whose losses are those of FP32 is healthy.

    Args:
        words: The command: 'python', 'train.py' and so on, or 'torchrun' and what it starts. Of several processes, the
            one is told of that goes wrong first; what they do not have in common comes first in the notes.
        trace_path: Where to keep the trace of the step that was looked into.
        keep_stdout: Whether what the script prints goes to stderr.
        as_device: 'cuda' runs a script that is written for a GPU on the CPU, as a GPU would, where there is none.
        tries_fixes: Whether changes of its source are tried: the script then runs again for some steps, its output is
            not shown, and what it writes is kept apart.
        fp32_steps: Steps of the run in FP32; 0 makes none, and then no script in 16 bits is called healthy. None: 100,
            or all of a script of up to 250, which says at its end what came of them.
        is_last: Whether nothing follows the answer. Then Ctrl-C ends the run that it finds, and what was seen so far is
            told; else it ends all.
        on_progress: Told what is tried, each time before a run whose output is not shown.
        on_start: Told before the run that has the script's own output. None: `on_progress` is.

    Raises:
        KeyboardInterrupt: Ctrl-C, where something follows, or where nothing was seen yet.
        TargetError: The command runs no Python code, or its interpreter lacks what floatline needs.
    """
    command = parse_launched(list(words))
    command.check_interpreter()
    began, say, device = time.perf_counter(), on_progress or _say_nothing, as_device or ""
    told = "; what was seen is told when it ends, or at Ctrl-C" if is_last else ""
    (on_start or say)(f"{command.name} runs as it is, under observation{told}")
    with QuietRuns(command, (MAIN, _MAIN)) as quiet:
        trace = str(Path(trace_path).absolute()) if trace_path else ""
        settings = (trace, device, "", str(MOST_STEPS if fp32_steps is None else fp32_steps))
        ranks, own, code = _run_as_it_is(command, quiet, settings, keep_stdout=keep_stdout)
        if not is_last:
            pass_on_ending(code)
        elif code in _ENDED_BY_CTRL_C:
            say("what was seen until Ctrl-C is looked into; Ctrl-C again ends that, too")
        seen = ranks.told
        found = read_report(" ".join(words), seen, code, time.perf_counter() - began)
        found = replace(found, findings=(*ranks.find_apart(), *found.findings))
        if found.start_seconds >= LONG_START:
            say(f"the script took {found.start_seconds:.0f} s before its first step, as every run that follows will")
        limit, search = _bound(fp32_steps, seen), _search_of(seen)
        took = time.perf_counter() - began
        runs = FP32Runs(
            command, quiet, device, limit, say, search=search, rank=ranks.teller, took=took, is_last=is_last
        )
        if found.unexplained and not code and seen["is_narrow"] and fp32_steps != 0:
            found, seen = _record_failure(found, seen, quiet, device, say)
        was_silent = bool(seen) and seen["is_narrow"] and is_silent(found, seen)
        if was_silent:
            found = look_beside(found, seen, own, None if fp32_steps == 0 else runs)
        elif found.verdict == "not-precision" and seen["is_narrow"] and fp32_steps != 0 and is_doubtful(found, seen):
            found = check_blame(found, seen, own, runs)
        elif found.unexplained and not code and seen["is_narrow"] and fp32_steps != 0:
            found = explain_by_fp32(found, seen, own, runs)
        if tries_fixes and found.primary is not None:
            steps = _count_steps(found.primary.cause.family, seen)
            # What shows beside FP32 alone may show in the last number only: a trial is as long as FP32's run.
            found = _Tries(quiet, device, max(steps, limit), runs).try_fixes(found, say)
    return replace(found, seconds=time.perf_counter() - began, notes=(*ranks.describe(), *found.notes))


_ENDED_BY_CTRL_C = (130, -signal.SIGINT)


def _bound(fp32_steps: int | None, seen: Mapping[str, Any]) -> int:
    """Steps after which a run in FP32 is ended: where none are asked for, all of a script that has not too many."""
    if fp32_steps is not None:
        return fp32_steps or _AT_LEAST
    num, (ops, elements) = seen.get("num_steps", 0), seen.get("work", (0, 0))
    is_light = num <= MOST_STEPS and 0 < ops * num <= MOST_OPS and elements * num <= MOST_ELEMENTS
    return max(STEPS, num if num <= WHOLE or is_light else 0)


def _search_of(seen: Mapping[str, Any]) -> Sequence[Sequence[int]]:
    """Steps that FP32 leaves out as well: none where a schedule went on in them, which is what may have done harm."""
    is_ahead = any(entry["cause"] == "scheduler-vs-skipped-step" for entry in seen.get("suspects", ()))
    return () if is_ahead else seen.get("search", ())


def _run_as_it_is(
    command: Command, quiet: QuietRuns, settings: Sequence[str], *, keep_stdout: bool
) -> tuple[RankReports, Shown, int]:
    """The reports of its processes, what the one showed that is told of, and the exit code."""
    with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
        report, (trace, *others) = Path(folder) / "report.json", settings
        kept = str(Path(folder) / "trace") if trace and command.launcher else trace
        code = quiet.run_aloud(_MAIN, str(report), kept, *others, keep_stdout=keep_stdout)
        ranks = RankReports.read(report)
        if not ranks.told:
            pass_on_ending(code)
        own = ranks.read_shown()
        if kept != trace and (written := path_of(Path(kept), ranks.teller)).exists():
            shutil.copyfile(written, trace)
    if "missing" in ranks.told:
        raise command.lacks(ranks.told["missing"])
    return ranks, own, code


def _record_failure(
    found: ScriptDiagnosis, seen: dict[str, Any], quiet: QuietRuns, device: str, say: Callable[[str], None]
) -> tuple[ScriptDiagnosis, dict[str, Any]]:
    """The diagnosis and report of a script that fails in a step that was not recorded, after it was, in another run."""
    step = seen["first_bad_step"]
    if step is None:
        return found, seen
    say(f"the script runs again to step {step:,}, which failed and was not looked into; its output is not shown")
    again, _, _ = _run_apart(quiet, device, {}, steps=step + _SEEN_AFTER, records=step)
    if not again or again["refused"] or (not again["findings"] and again["fails_in_fp32"] is None):
        return found, seen
    told = read_report(found.target, again, 0, found.seconds)
    note = f"step {step:,} was looked into when the script ran again"
    return replace(told, notes=(*found.notes, note)), again | {"num_steps": seen["num_steps"]}


_SEEN_AFTER = 3  # steps after which what failed is known, also on a GPU


def _run_apart(
    quiet: QuietRuns, device: str, sources: Mapping[str, str], *, steps: int, records: int | None = None
) -> tuple[dict[str, Any], Shown, str]:
    """The report of another run, {} where there is none; what it showed; and why it came to no end.

    Args:
        quiet: Runs it.
        device: As in `diagnose_script`.
        sources: Changed texts, by path.
        steps: How many it makes. What it writes is kept apart.
        records: A step that is recorded besides those that always are.
    """
    with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
        report, trial, writes = (Path(folder, name) for name in ("report.json", "trial.json", "writes"))
        writes.mkdir()
        job = {"sources": dict(sources), "steps": steps, "records": records, "folder": str(writes)}
        trial.write_text(json.dumps(job), encoding="utf-8")
        with trial_environment(writes) as env:
            problem = quiet.run(_MAIN, str(report), "", device, str(trial), str(steps), env=env)
        ranks = RankReports.read(report)
        return ranks.told, ranks.read_shown(cut=True), problem


def _say_nothing(_text: str) -> None:
    pass


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
        runs: What it shows in FP32, which it must show with a change as well.
    """

    quiet: QuietRuns
    device: str
    steps: int
    runs: FP32Runs

    def try_fixes(self, found: ScriptDiagnosis, say: Callable[[str], None]) -> ScriptDiagnosis:
        """Changes that are known for what was found, tried; those that hold are kept."""

        def say_again(what: str) -> None:
            say(f"{what}: the script runs again for up to {self.steps} steps, its output is not shown")

        found = replace(found, num_steps=self.steps)
        tried = try_fixes(found, self._diagnose, root=Path.cwd(), say=say_again, in_fp32=self.runs.changed)
        return replace(found, findings=tried.findings, fixes=tried.fixes)

    def _diagnose(self, sources: Mapping[str, str]) -> Diagnosis | str:
        """Diagnose the script again with changed texts, by path; what it writes is kept apart."""
        seen, own, problem = _run_apart(self.quiet, self.device, sources, steps=self.steps)
        if not seen or "missing" in seen:
            return problem or "the process that tried it ended without a word"
        if seen["refused"]:
            return f"the script cannot run beside its own files, {seen['refused'][0]}"
        found = read_report("the script", seen, seen["exit_code"], 0.0)
        if found.verdict == "healthy":
            beside = compare_run(seen, own, self.runs.with_changes(sources, _search_of(seen)))
            if beside.apart:
                return replace(found, unexplained=beside.apart, fails_in_fp32=False)
        num, recorded = seen["num_steps"], seen["num_recorded"]
        return replace(found, notes=(f"{num:,} steps without a finding, {recorded} of them compared with FP32",))
