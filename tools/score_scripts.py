"""Diagnoses the scripts of tests/scripts, healthy and with planted failures, and writes them into the page of scores.

    python tools/score_scripts.py [PREFIX ...] [--processes N] [--no-healthy]

With a prefix, only the runs whose names begin so are made, and no page is written. Each script runs in a process of its
own, forked from one that has imported torch, as `floatline diagnose --as cuda -- python SCRIPT` would run it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "diagnose_scores.md"
BEGIN, END = "<!-- Scripts: made by tools/score_scripts.py -->", "<!-- End of scripts -->"
sys.path.insert(0, str(ROOT))

from tests.scripts.planted import FOLDER, PLANTED, Planted, make_script  # noqa: E402

INTRO = """\
## Whole scripts

The training scripts of [tests/scripts](../tests/scripts/planted.py) were written by somebody who had not seen how
`diagnose` works, in the styles that people use: accumulation, two optimizers, FP32 copies of the weights by hand,
updates by hand, frameworks. Each was given to `floatline diagnose --as cuda -- python SCRIPT` healthy, in FP32, FP16
and BF16, and with each of its planted failures. `python tools/score_scripts.py` makes this part again.
"""


@dataclass(frozen=True)
class Run:
    """One run of a script: healthy, or with a failure."""

    name: str
    script: str
    arguments: tuple[str, ...]
    planted: Planted | None = None


@dataclass(frozen=True)
class Score:
    """What was said of a run."""

    run: Run
    found: str
    place: str
    verdict: str
    seconds: float
    cause_right: bool
    place_right: bool
    verdict_right: bool


def all_runs(*, healthy: bool) -> Iterator[Run]:
    """Healthy runs of each script in three precisions, and each failure."""
    names = sorted({planted.script for planted in PLANTED})
    for script in names if healthy else ():
        for precision in ("fp32", "fp16", "bf16"):
            yield Run(f"{script}/{precision}", script, ("--precision", precision))
    for planted in PLANTED:
        yield Run(f"{planted.script}/{planted.name}", planted.script, planted.arguments, planted)


def _watch(report: str, words: list[str], log: str) -> None:
    """Run a script in this process, watched."""
    from floatline.diagnosis.scripts.main import main

    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    main(report, "", "cuda", "", "0", words)  # FP32 is not run beside it: what the watch alone tells is scored


class Started:
    """A script that runs in a process of its own."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.folder = tempfile.TemporaryDirectory()
        place = Path(self.folder.name)
        path = FOLDER / f"{run.script}.py" if run.planted is None else make_script(run.planted, place)
        self.words, self.report = [str(path), *run.arguments], place / "report.json"
        self.began = time.perf_counter()
        given = (str(self.report), self.words, str(place / "log"))
        self.process = multiprocessing.get_context("fork").Process(target=_watch, args=given)
        self.process.start()


def score_all(runs: list[Run], processes: int) -> Iterator[Score]:
    """Score runs, several at a time, in the order in which they end."""
    left, started = list(runs), list[Started]()
    while left or started:
        while left and len(started) < processes:
            started.append(Started(left.pop(0)))
        wait([one.process.sentinel for one in started])
        for one in [one for one in started if not one.process.is_alive()]:
            started.remove(one)
            yield score(one)


def score(ended: Started) -> Score:
    """Compare what is said of a run with what is true."""
    from floatline.diagnosis.scripts.script import read_report
    from floatline.errors import TargetError

    run, report, words = ended.run, ended.report, ended.words
    with ended.folder:
        ended.process.join()
        code = ended.process.exitcode or 0
        seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        seconds = time.perf_counter() - ended.began
        try:
            said = read_report(" ".join(words), seen, 128 - code if code < 0 else code, seconds)
        except TargetError as error:
            return Score(run, str(error), "", "no-verdict", seconds, False, False, False)
        first = said.primary
        found = (first.cause.id if first else "") or said.no_verdict or said.unexplained or "healthy"
        lines = Path(first.file).read_text(encoding="utf-8").splitlines() if first and first.file else []
        line = lines[first.line - 1].strip() if first and 0 < first.line <= len(lines) else ""
        place = f"{first.line}: {line}" if line else (first.module if first else "")
    if run.planted is None:
        fine = said.verdict == "healthy"
        return Score(run, found, place, said.verdict, seconds, fine, fine, fine)
    return Score(
        run,
        found,
        place,
        said.verdict,
        seconds,
        cause_right=found in run.planted.cause,
        place_right=found in run.planted.cause and line in {text.strip() for text in run.planted.line},
        verdict_right=said.verdict == run.planted.verdict,
    )


def sums(scores: list[Score]) -> list[tuple[str, str]]:
    """What is right in all, false alarms first."""
    healthy = [one for one in scores if one.run.planted is None]
    loud = [one for one in scores if one.run.planted is not None and one.run.planted.loud]
    silent = [one for one in scores if one.run.planted is not None and not one.run.planted.loud]
    failures = loud + silent
    return [
        ("false alarms in healthy runs", f"{sum(not one.cause_right for one in healthy)} of {len(healthy)}"),
        ("right cause first", _share([one.cause_right for one in failures])),
        ("of the loud ones", _share([one.cause_right for one in loud])),
        ("of the silent ones", _share([one.cause_right for one in silent])),
        ("right line", _share([one.place_right for one in failures])),
        ("right verdict", _share([one.verdict_right for one in failures])),
    ]


def _share(right: list[bool]) -> str:
    return f"{sum(right)} of {len(right)}" + (f" ({100 * sum(right) / len(right):.0f} %)" if right else "")


def row(one: Score) -> tuple[str, ...]:
    """One line of the table."""
    expected = "healthy" if one.run.planted is None else " or ".join(one.run.planted.cause)
    place = one.place if one.place_right or one.run.planted is None else f"**{one.place or 'none'}**"
    found = one.found if one.cause_right else f"**{one.found}**"
    verdict = one.verdict if one.verdict_right else f"**{one.verdict}**"
    return one.run.name, expected, found, place, verdict


def part(scores: list[Score]) -> str:
    """This part of the page as Markdown."""
    lines = [INTRO, "| | |", "|---|---|", *(f"| {what} | {how_many} |" for what, how_many in sums(scores)), ""]
    lines += ["| run | expected | found first | line | verdict |", "|---|---|---|---|---|"]
    for one in scores:
        cells = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in row(one))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([BEGIN, "", *lines, "", END])


def main() -> None:
    """Score, print, and write this part of the page if every run was made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-healthy", action="store_true", help="Only the planted failures.")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    prefixes = tuple(asked.prefixes) or ("",)
    runs = [run for run in all_runs(healthy=not asked.no_healthy) if run.name.startswith(prefixes)]
    scores: list[Score] = []
    for one in score_all(runs, asked.processes):
        print("ok  " if one.cause_right and one.place_right and one.verdict_right else "MISS", end="  ")
        print("  ".join(row(one)), f"{one.seconds:.0f} s", flush=True)
        scores.append(one)
    scores.sort(key=lambda one: [run.name for run in runs].index(one.run.name))
    for what, how_many in sums(scores):
        print(f"{what}: {how_many}")
    if not asked.prefixes and not asked.no_healthy:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(before.rstrip() + "\n\n" + part(scores) + "\n" + after, encoding="utf-8")
        print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
