"""ScriptArm: one script under one plan, run once for each seed; the metric is its loss, or what it prints or writes."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from floatline.errors import ComparisonError
from floatline.plans import Plan
from floatline.running.command import parse_command, trial_environment
from floatline.validation.metrics.metric_files import choose_recorded, list_files, read_all
from floatline.validation.metrics.recorded import Recorded
from floatline.validation.metrics.text import read_json_lines
from floatline.validation.running.jobs import Job
from floatline.validation.running.supervised import run_supervised
from floatline.validation.study.commands import as_run, explain_end, fill_in, fresh_folder
from floatline.validation.verdict.curves import late_peak
from floatline.validation.verdict.pairs import NUM_FIRST_LOSSES, ArmRun

RUN = "floatline.validation.study.script_arms:run_job"
LOSS = "loss"
# A curve of losses is one of means, so that a single batch does not decide.
_NUM_POINTS = 20
# No name of a metric has these.
_OF_EXPRESSIONS = ("(", "[", "\\")
_EXAMPLE = "'val loss (?P<value>[0-9.]+)'"


@dataclass(frozen=True)
class ScriptArm:
    """One script under one plan.

    Args:
        name: Of the arm.
        words: The command: 'python', 'train.py' and so on; `{seed}` and `{folder}` are filled in.
        under: The plan; None runs the script as it is.
        folder: The study's. The runs' own folders are made in it, as scripts/ARM/SEED.
        metric: 'loss' is the loss as its backward passes begin with it; an expression with a group finds values in
            what the script prints; any other name is looked for in files that it writes.
        steps: Steps after which the script is ended; None lets it run to its end.
        device: 'cuda' runs a script that is written for a GPU on the CPU, where there is none.
        shifts: Whether the script's own seeds are raised by the arm's.
        sources: Texts that are imported instead of files, by path.
    """

    name: str
    words: tuple[str, ...]
    under: Plan | None
    folder: Path
    metric: str = LOSS
    steps: int | None = None
    device: str = ""
    shifts: bool = False
    sources: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {} if self.under is None else self.under.as_given()

    def job(self, seed: int) -> Job:
        """Run it with this seed."""
        settings = {
            "words": list(self.words),
            "plan": self.plan or None,
            "folder": str(self.folder.absolute()),
            "cwd": str(Path.cwd()),
            "metric": self.metric,
            "steps": self.steps,
            "device": self.device,
            "shifts": self.shifts,
            "sources": self.sources,
        }
        return Job(self.name, seed, RUN, settings)


@dataclass(frozen=True)
class ScriptResult:
    """What a script did under a plan.

    Args:
        losses: One for each step.
        skipped: Numbers of the steps that were left out.
        error: What ended it; '' where it came to its end.
        seconds: How long it took.
        scale: The loss scale at its end.
        first_scale: The one that its search began at.
        seeded: Where the script seeds itself, and with what.
        folder: Where its output and what it wrote are.
    """

    losses: tuple[float, ...]
    skipped: tuple[int, ...]
    error: str
    seconds: float
    scale: float
    first_scale: float
    seeded: tuple[str, ...]
    folder: Path


def run_script(job: Job) -> ScriptResult:
    """Run the script once; its output, and whatever it writes, go to a folder of the run's own.

    Raises:
        ComparisonError: It cannot be kept apart from its own files.
    """
    given = job.settings
    own = fresh_folder(Path(given["folder"]) / "scripts" / job.arm, job.seed)
    writes, report, log = own / "files", own / "report.json", own / "losses.jsonl"
    writes.mkdir()
    log.touch()
    words = [fill_in(word, seed=job.seed, folder=own) for word in given["words"]]
    keys = ("plan", "steps", "device", "sources")
    task = {key: given[key] for key in keys} | {
        "seed": job.seed,
        "shift": job.seed if given["shifts"] else 0,
        "log": str(log),
        "folder": str(writes),
    }
    (own / "job.json").write_text(json.dumps(task), encoding="utf-8")
    start = parse_command(words).inside("floatline.running.main", str(report), f"@{own / 'job.json'}")
    began = time.monotonic()
    with (
        (own / "stdout.txt").open("wb") as out,
        (own / "stderr.txt").open("wb") as err,
        trial_environment(writes) as environment,
    ):
        code = run_supervised(start, cwd=Path(given["cwd"]), out=out, err=err, env=environment)
    seconds = time.monotonic() - began
    seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if "missing" in seen:
        raise ComparisonError(f"{start[0]} cannot import {seen['missing']}, which floatline needs there. Install it.")
    if seen.get("refused"):
        raise ComparisonError(f"The script cannot run beside its own files: {seen['refused'][0]}.")
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    ended = "" if not code else seen.get("error") or explain_end(code, own)
    return ScriptResult(
        losses=tuple(math.nan if row["loss"] is None else row["loss"] for row in rows),
        skipped=tuple(number for number, row in enumerate(rows) if not row["applied"]),
        error=ended,
        seconds=seconds,
        scale=float(seen.get("scale", 1.0)),
        first_scale=float(seen.get("first_scale", 1.0)),
        seeded=tuple(seen.get("seeded", ())),
        folder=own,
    )


def run_job(job: Job) -> ArmRun:
    """Run the script once, and read its metric.

    Raises:
        ComparisonError: Its metric cannot be found. A script that fails gives a run with an `error` instead.
    """
    result, metric = run_script(job), job.settings["metric"]
    run = ArmRun(
        job.arm,
        job.seed,
        math.nan,
        steps=len(result.losses),
        applied=len(result.losses) - len(result.skipped),
        skipped=count_late(result.skipped, len(result.losses)),
        peak=late_peak(result.losses),
        first_losses=result.losses[:NUM_FIRST_LOSSES],
        seconds=result.seconds,
        error=result.error,
    )
    if result.error:
        return run
    if metric == LOSS:
        value, curve = _read_losses(result.losses)
        return replace(run, metric=value, curve=curve, curve_of="loss")
    found = as_run(_read_metric(metric, result.folder), metric, arm=job.arm, seed=job.seed)
    return replace(run, metric=found.metric, start=found.start, curve=found.curve)


# So many steps in a row that are made end the search for a loss scale.
_SETTLED = 10


def count_late(skipped: Sequence[int], num: int) -> int:
    """Steps that were left out after the search for a loss scale at the start; all, where that takes half of the run.

    Args:
        skipped: Numbers of the steps that were left out.
        num: Of all steps.
    """
    found, late = 0, list(skipped)
    while late and late[0] - found < _SETTLED:
        found = late.pop(0) + 1
    return len(skipped) if found > num // 2 else len(late)


def _read_losses(losses: Sequence[float]) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The mean over the last tenth of the steps, and a curve of means over twentieths of them."""
    if not losses:
        raise ComparisonError("No optimizer of the script made a step with a loss. Name what it prints by --metric.")
    size = max(1, len(losses) // _NUM_POINTS)
    ends = range(size, len(losses) + 1, size)
    curve = tuple((end, sum(losses[end - size : end]) / size) for end in ends)
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last), curve


def is_expression(metric: str) -> bool:
    """Whether a metric is an expression with a group, which finds values in what a script prints.

    Raises:
        ComparisonError: It is one that cannot be compiled, or that has no group.
    """
    if not any(mark in metric for mark in _OF_EXPRESSIONS):
        return False
    try:
        has_group = re.compile(metric).groups > 0
    except re.error as error:
        raise ComparisonError(f"--metric '{metric}' is no regular expression: {error}. Escape its brackets.") from None
    if not has_group:
        raise ComparisonError(f"--metric '{metric}' has no group that holds the value. Write {_EXAMPLE}.")
    return True


def _read_metric(metric: str, own: Path) -> Recorded:
    if not is_expression(metric):
        runs, _ = read_all(list_files(own / "files", leave_out=[]), strict=False)
        runs.append(read_json_lines(own / "stdout.txt", strict=False))
        return choose_recorded(runs, metric, where=f"what the script wrote or printed, kept in '{own}'")
    expression = re.compile(metric)
    name = "value" if "value" in expression.groupindex else 1
    text = "\n".join((own / file).read_text("utf-8", errors="replace") for file in ("stdout.txt", "stderr.txt"))
    found = Recorded(own / "stdout.txt", "text")
    for number, match in enumerate(expression.finditer(text)):
        value = _parse(match[name] or "")
        if value is None:
            raise ComparisonError(
                f"--metric '{metric}' found '{match[0]}', and '{match[name]}' is no number. Put it in a group: "
                f"{_EXAMPLE}."
            )
        found.add(metric, number, value)
    if not found.values:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        raise ComparisonError(
            f"--metric '{metric}' matches nothing that the script prints. Its last line is '{last}'. "
            f"Write an expression for a line that it prints, such as {_EXAMPLE}."
        )
    return found


def _parse(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
