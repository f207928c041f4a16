"""Diagnoses the scripts of tests/scripts, healthy and with planted failures, and writes them into the page of scores.

    python tools/score_scripts.py [PREFIX ...] [--processes N] [--no-healthy]

With a prefix, only the runs whose names begin so are made, and no page is written. Each script is given to
`floatline diagnose --as cuda -- python SCRIPT`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
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


def score_all(runs: list[Run], processes: int) -> Iterator[Score]:
    """Score runs, several at a time, in the order in which they end."""
    with ThreadPoolExecutor(processes) as pool:
        for ended in as_completed([pool.submit(score, run) for run in runs]):
            yield ended.result()


def score(run: Run) -> Score:
    """Diagnose a run, and compare what is said of it with what is true."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = FOLDER / f"{run.script}.py" if run.planted is None else make_script(run.planted, Path(folder))
        command = [sys.executable, "-m", "floatline", "diagnose", "--as", "cuda", "--no-try", "--format", "json", "--"]
        ran = subprocess.run(
            [*command, sys.executable, str(path), *run.arguments], capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - began
        said: dict[str, Any] = json.loads(ran.stdout) if ran.stdout else {"verdict": "no-verdict", "findings": []}
        first: dict[str, Any] = next(iter(said["findings"]), {})
        found = first.get("cause") or said.get("no_verdict") or said.get("unexplained") or "healthy"
        lines = Path(first["file"]).read_text(encoding="utf-8").splitlines() if first.get("file") else []
        line = lines[first["line"] - 1].strip() if lines and 0 < first["line"] <= len(lines) else ""
        place = f"{first['line']}: {line}" if line else first.get("module", "")
    verdict = said["verdict"] if ran.stdout else f"no answer: {ran.stderr[-80:]}"
    if run.planted is None:
        fine = verdict == "healthy"
        return Score(run, found, place, verdict, seconds, fine, fine, fine)
    return Score(
        run,
        found,
        place,
        verdict,
        seconds,
        cause_right=found in run.planted.cause,
        place_right=found in run.planted.cause and line in {text.strip() for text in run.planted.line},
        verdict_right=verdict == run.planted.verdict,
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
