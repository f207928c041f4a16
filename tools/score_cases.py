"""Diagnoses every case of tests/cases and its fixed twin, and writes docs/diagnose_scores.md.

python tools/score_cases.py [PREFIX ...] [--processes N]: only the cases whose names begin so; then no page is written.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "diagnose_scores.md"
sys.path.insert(0, str(ROOT))

from tests.cases.harness import FOLDER, all_cases  # noqa: E402
from tests.cases.scoring import Score, score_case  # noqa: E402

INTRO = """\
<!-- Made by tools/score_cases.py. Do not edit by hand. -->

# Diagnose, scored

Every failure of [tests/cases](../tests/cases/harness.py) was given to `floatline diagnose` as a target, and so was its
fixed twin, in which nothing may be found. A cause is right if the first finding names it; a place if that finding
names the line, the module or the parameter exactly; a verdict if precision is told from what is not precision.
Misses are in the table. `python tools/score_cases.py` makes this page again.

These cases were known while `diagnose` was written: on failures that it has never seen, expect less.
"""


def diagnose_quietly(target: str) -> dict[str, Any]:
    """What `floatline diagnose TARGET --format json` prints; what the target prints is dropped."""
    from floatline.diagnosis.target_diagnosis import diagnose

    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        return diagnose(target).as_json()


def score_all(prefixes: tuple[str, ...], processes: int) -> list[Score]:
    """Score the cases whose names begin with one of the prefixes, several at a time."""
    cases = [case for case in all_cases() if case.name.startswith(prefixes)]
    scores = []
    # Processes with a thread for each core would wait for each other, and a case take ten times as long.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for score in pool.map(partial(score_case, diagnose=diagnose_quietly), cases):
            print("  ".join(row(score)), flush=True)
            scores.append(score)
    return scores


def row(score: Score) -> tuple[str, ...]:
    """One line of the table."""
    found = score.found if score.cause_right else f"**{score.found}**"
    place = score.where if score.place_right else f"**{score.where or 'none'}**"
    verdict = "right" if score.verdict_right else "**wrong**"
    twin = f"**{', '.join(score.alarms)}**" if score.alarms else "silent"
    return score.name, score.expected, found, place, verdict, twin, f"{score.seconds:.1f}"


def sums(scores: list[Score]) -> list[tuple[str, str]]:
    """What is right in all, as (of what, how many)."""
    failures = [score for score in scores if not score.healthy]
    silent = sum(not score.alarms for score in scores)
    seconds = [score.seconds for score in scores]
    return [
        ("right cause first", _share(sum(score.cause_right for score in failures), len(failures))),
        ("right place", _share(sum(score.place_right for score in failures), len(failures))),
        ("right verdict", _share(sum(score.verdict_right for score in scores), len(scores))),
        ("silent on healthy training (controls and fixed twins)", _share(silent, len(scores))),
        ("seconds a case, median and longest", f"{median(seconds):.1f}, {max(seconds):.1f}"),
    ]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.0f} %)" if whole else "")


def page(scores: list[Score]) -> str:
    """The whole page as Markdown."""
    lines = [INTRO, "| | |", "|---|---|"]
    lines += [f"| {what} | {how_many} |" for what, how_many in sums(scores)]
    lines += [
        "",
        "| case | expected | found first | place | verdict | twin or control | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for score in scores:
        name, *rest = row(score)
        link = f"[{name}](../{FOLDER.relative_to(ROOT).as_posix()}/{name}.py)"
        lines.append("| " + " | ".join([link, *(cell.replace("|", "\\|") for cell in rest)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Score, print, and write the page if every case was scored."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    scores = score_all(tuple(asked.prefixes) or ("",), asked.processes)
    for what, how_many in sums(scores):
        print(f"{what}: {how_many}")
    if not asked.prefixes:
        others = PAGE.read_text(encoding="utf-8").partition("<!-- Scripts:")  # other tools write what follows
        PAGE.write_text(f"{page(scores).rstrip()}\n\n{others[1]}{others[2]}", encoding="utf-8")
        print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
