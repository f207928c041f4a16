"""Commands from outside as arms: a training script is run untouched for each seed, and its metric is read."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floatline.errors import ComparisonError
from floatline.validation.metrics.metric_files import changed_files, choose_recorded, list_files, match_files, read_all
from floatline.validation.metrics.recorded import Recorded, is_flat
from floatline.validation.metrics.text import read_json_lines
from floatline.validation.running.jobs import Job
from floatline.validation.running.supervised import run_supervised
from floatline.validation.verdict.pairs import BROKEN, NUDGED, REFERENCE, ArmRun

RUN = "floatline.validation.study.commands:run_job"
ERROR_TAIL = 16 << 10
LONGEST_NAME = 60


@dataclass(frozen=True)
class CommandArm:
    """One command, run once for each seed.

    Args:
        name: Of the arm.
        command: As the user wrote it; `{seed}` and `{folder}` are filled in.
        metric: What is read from what it leaves behind.
        folder: The study's. The runs' own folders are made in it, as commands/ARM/SEED.
        cwd: Where it runs.
        metric_file: Pattern of the files that hold the metric, relative to `cwd`; None: whatever it writes.
    """

    name: str
    command: str
    metric: str
    folder: Path
    cwd: Path = field(default_factory=Path.cwd)
    metric_file: str | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """The command takes the place of a plan."""
        return {"name": self.name, "command": self.command}

    def job(self, seed: int) -> Job:
        """Run it with this seed.

        A command without `{folder}` writes where every other run writes, too: such ones run here, one at a time, so
        that what is new after a run is that run's.
        """
        settings = {
            "command": self.command,
            "metric": self.metric,
            "folder": str(self.folder.absolute()),
            "cwd": str(self.cwd.absolute()),
            "metric_file": self.metric_file,
        }
        job = Job(self.name, seed, RUN, settings)
        if "{folder}" in self.command:
            return job
        return Job(self.name, seed, settings=settings, function=lambda _seed: run_job(job))


def command_arms(
    baseline: str,
    candidates: Sequence[str],
    *,
    metric: str,
    folder: Path,
    cwd: Path | None = None,
    metric_file: str | None = None,
) -> list[CommandArm]:
    """The arms of a study of commands, the reference first.

    Args:
        baseline: The command that trains in FP32.
        candidates: One command for each candidate.
        metric: Name of the metric.
        folder: The study's.
        cwd: Where the commands run; None is the current folder.
        metric_file: Pattern of the files that hold the metric.

    Raises:
        ComparisonError: A command cannot be run, lacks `{seed}`, or is there twice.
    """
    cwd = Path.cwd() if cwd is None else cwd
    if not cwd.is_dir():
        raise ComparisonError(f"The working folder '{cwd}' is not there. Check --cwd.")
    if not metric:
        raise ComparisonError("The commands need a metric. Name one that they write: --metric val/loss.")
    if not candidates:
        raise ComparisonError("There is a baseline and no candidate. Give --candidate 'python train.py … seed={seed}'.")
    words = [check_command(command, cwd) for command in (baseline, *candidates)]
    for place, own in enumerate(words):
        if own in words[:place]:
            raise ComparisonError(f"Two commands are the same: '{shlex.join(own)}'. Each arm needs its own.")
    names = [REFERENCE, *_name_candidates(words[0], words[1:])]
    return [
        CommandArm(name, command, metric, folder, cwd, metric_file)
        for name, command in zip(names, (baseline, *candidates), strict=True)
    ]


def check_command(command: str, cwd: Path) -> list[str]:
    """The words of a command, as a shell would split them and with nothing else of a shell.

    Raises:
        ComparisonError: It is empty, a quote is left open, `{seed}` is missing, or there is no such program.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ComparisonError(f"Command '{command}' cannot be split: {error}. Close the quote.") from None
    if not words:
        raise ComparisonError("A command is empty. Give such as 'python train.py seed={seed}'.")
    if "{seed}" not in command:
        raise ComparisonError(f"Command '{command}' has no {{seed}}, so that all its runs would be the same. Add it.")
    if _find_program(words[0], cwd) is None:
        raise ComparisonError(f"Command '{words[0]}' is not found. Check the spelling, or give its full path.")
    return words


def fill_in(text: str, *, seed: int, folder: Path) -> str:
    """`{seed}` and `{folder}` replaced; every other brace is kept."""
    values = {"{seed}": str(seed), "{folder}": str(folder)}
    return re.sub(r"\{seed\}|\{folder\}", lambda match: values[match.group()], text)


def run_job(job: Job) -> ArmRun:
    """Run the command once, wait for it, and read its metric.

    Raises:
        ComparisonError: It cannot be started, or its metric cannot be found. A command that fails gives a run with
            an `error` instead.
    """
    settings = job.settings
    cwd, study = Path(settings["cwd"]), Path(settings["folder"])
    own = fresh_folder(study / "commands" / job.arm, job.seed)
    words = [fill_in(word, seed=job.seed, folder=own) for word in shlex.split(settings["command"])]
    pattern = settings["metric_file"]
    pattern = None if pattern is None else fill_in(pattern, seed=job.seed, folder=own)
    places = (own,) if "{folder}" in settings["command"] else (cwd, own)
    before = _look(pattern, places, cwd, study)
    began, started = time.monotonic(), time.time()
    code = _run(words, cwd, own)
    seconds = time.monotonic() - began
    if code:
        return ArmRun(job.arm, job.seed, float("nan"), seconds=seconds, error=explain_end(code, own))
    after = _look(pattern, places, cwd, study)
    new = changed_files(before, after)
    if pattern is not None and not new:
        stale = "is there, but was not written by this run" if after else "matches no file"
        raise ComparisonError(f"--metric-file '{pattern}' {stale}. Check the pattern, and where the script writes.")
    runs, problems = read_all(new, strict=pattern is not None)
    runs = [run for run in runs if run.began is None or run.began >= started - 1]
    if pattern is None:
        runs.append(read_json_lines(own / "stdout.txt", strict=False))
    where = f"what '{shlex.join(words)}' wrote" if pattern is None else f"'{pattern}'"
    try:
        recorded = choose_recorded(runs, settings["metric"], where=where)
    except ComparisonError as error:
        raise ComparisonError(f"{error}{_also(problems)}") from None
    return as_run(recorded, settings["metric"], arm=job.arm, seed=job.seed, seconds=seconds)


def as_run(recorded: Recorded, metric: str, *, arm: str, seed: int, seconds: float | None = None) -> ArmRun:
    """What was recorded of a metric, as the run of an arm.

    The value before training is not in such files. Where the whole curve is flat, its value is the start as well:
    nothing was learned, whatever it was.
    """
    name = recorded.spelling(metric) or metric
    curve = recorded.curve(name)
    start = curve[0][1] if is_flat(curve) else None
    return ArmRun(arm, seed, recorded.last(name), start=start, curve=curve, seconds=seconds)


def _run(words: list[str], cwd: Path, own: Path) -> int:
    """Run to the end, with both outputs in the run's folder."""
    program = _find_program(words[0], cwd)
    if program is None:
        raise ComparisonError(f"Command '{words[0]}' is not found. Check the spelling, or give its full path.")
    with (own / "stdout.txt").open("wb") as out, (own / "stderr.txt").open("wb") as err:
        return run_supervised([program, *words[1:]], cwd=cwd, out=out, err=err)


def _look(pattern: str | None, places: Sequence[Path], cwd: Path, study: Path) -> dict[Path, tuple[int, int]]:
    if pattern is not None:
        return match_files(pattern, cwd)
    found: dict[Path, tuple[int, int]] = {}
    for place in places:
        # What the study and other runs keep is no place to look, wherever the study lies.
        found.update(list_files(place, leave_out=[] if place.is_relative_to(study) else [study]))
    return found


def fresh_folder(folder: Path, seed: int) -> Path:
    """A folder that no run has used: an earlier try, cut short, keeps its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        place = folder / (str(seed) if number == 1 else f"{seed}-{number}")
        with contextlib.suppress(FileExistsError):
            place.mkdir()
            return place.absolute()
    raise ComparisonError(f"'{folder}' has 10,000 tries of seed {seed}. Choose another study folder.")


def _find_program(word: str, cwd: Path) -> str | None:
    """The program's path; one with a slash in it is looked for from where the command runs."""
    if os.sep in word or (os.altsep and os.altsep in word):
        word = str((cwd / word).absolute())
    return shutil.which(word)


def explain_end(code: int, own: Path) -> str:
    """How a command ended, with the last line of its errors."""
    with (own / "stderr.txt").open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - ERROR_TAIL))
        lines = [line for line in file.read().decode("utf-8", errors="replace").splitlines() if line.strip()]
    last = f": {lines[-1].strip():.200}" if lines else ""
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the command {how}{last}; see '{own / 'stderr.txt'}'"


def _also(problems: Sequence[str]) -> str:
    return f" Also: {problems[0]}" if problems else ""


def _name_candidates(baseline: list[str], candidates: list[list[str]]) -> list[str]:
    """Each candidate is named by the words that the baseline does not have: 'precision=16'."""
    names: list[str] = []
    for place, words in enumerate(candidates, 1):
        own = "-".join(word for word in words if word not in baseline and "{" not in word)
        name = re.sub(r"[^\w.=+-]+", "-", own).strip("-.")[:LONGEST_NAME]
        if not name or name in (REFERENCE, NUDGED, BROKEN, *names):
            name = f"candidate-{place}"
        names.append(name)
    return names
