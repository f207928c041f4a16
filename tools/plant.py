"""Plants hazards at random into healthy scripts, checks each by running it, and scores what diagnose says of them.

    python tools/plant.py make --seed 1 --num 300 --out FOLDER
    python tools/plant.py score FOLDER [--processes K]
    python tools/plant.py round --seed 1 --num 150 --out FOLDER --processes K [--minutes M]
    python tools/plant.py page FOLDER [FOLDER ...]

make writes as many plants as controls, each beside a JSON file with the truth; a draw that does not do what its truth
says is thrown away and counted. Both commands go on where they were stopped. The hazards lie in tests/plants.
round makes and scores script after script, for some minutes at most: each script stands in scored.jsonl as soon as it
is judged. Scripts count up to the first that is not: what takes long is not left out for that.
page writes the scores of such folders, each of one seed, with all misses, into docs/diagnose_scores.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

from tests.plants.catalogue import HAZARDS, draw_number  # noqa: E402

MOST_TRIES = 20
PAGE = ROOT / "docs" / "diagnose_scores.md"
BEGIN, END = "<!-- Plants: made by tools/plant.py page -->", "<!-- End of plants -->"
INTRO = """\
## Planted at random

Hazards and as many harmless changes, drawn by a seed into healthy scripts (`tools/plant.py`), checked by running them
in 16 bits and in FP32, and never looked at before they were scored. A later seed is scored after what the earlier ones
showed was changed.
"""


def make(seed: int, num: int, out: Path, only: str) -> None:
    """Write plants and controls, each checked."""
    import torch
    from tests.plants.check import Checker

    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    checker = Checker(out / "hosts")
    for at in range(2 * num):
        if not (out / f"{at:04d}.json").exists():
            _make_one(out, at, seed, checker, only)
    count = Counter(json.loads(line)["accepted"] for line in (out / "draws.jsonl").read_text().splitlines())
    print(f"{count[True]} accepted, {count[False]} rejected")


def _make_one(out: Path, at: int, seed: int, checker, only: str = "") -> dict[str, Any] | None:
    """Write the plant, or control where it is odd, of a place in the round; None where no draw did what it says."""
    name, number, control = f"{at:04d}", at // 2, at % 2 == 1
    hazards = [one for one in HAZARDS if only in one.name]
    for attempt in range(MOST_TRIES):
        plant = draw_number(seed, number, attempt, control=control, hazards=hazards)
        checked = checker.check(plant)
        words = f"{plant.hazard.name} in {plant.host}, {plant.dtype}"
        print(
            f"{name} {'control' if control else 'plant':7} {'yes' if checked.holds else 'no '} {words}: {checked.why}",
            flush=True,
        )
        with (out / "draws.jsonl").open("a", encoding="utf-8") as log:
            row = {"hazard": plant.hazard.name, "host": plant.host, "dtype": plant.dtype, "control": control}
            log.write(json.dumps({**row, "accepted": checked.holds, "why": checked.why}) + "\n")
        if checked.holds:
            (out / f"{name}.py").write_text(plant.text, encoding="utf-8")
            truth = truth_of(plant, checked, name, seed, attempt)
            (out / f"{name}.json").write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")
            return truth
    return None


def truth_of(plant, checked, name: str, seed: int, rejections: int) -> dict[str, Any]:
    """What is true of a script, as JSON."""
    hazard = plant.hazard
    return {
        "id": name,
        "seed": seed,
        "host": plant.host,
        "hazard": hazard.name,
        "dtype": plant.dtype,
        "control": plant.control,
        "loud": checked.loud,
        "causes": [] if plant.control else list(hazard.causes),
        "verdict": "healthy" if plant.control else hazard.verdict,
        "places": [] if plant.control else list(plant.places),
        "rejections": rejections,
        "seen": checked.why,
        "results": checked.results,
    }


def score_one(truth: dict[str, Any], folder: Path, limit: float = 600.0) -> dict[str, Any]:
    """Diagnose one script and compare what is said with the truth; no answer within some seconds is a wrong one."""
    path = folder / f"{truth['id']}.py"
    asked = ["diagnose", "--as", "cuda", "--format", "json", "--no-try", "--", sys.executable, path]
    began = time.perf_counter()
    command = [sys.executable, "-m", "floatline", *asked]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        said = json.loads(ran.stdout[ran.stdout.index("{") :])
    except (ValueError, subprocess.TimeoutExpired) as error:
        said = {"verdict": f"no answer: {error}"[:80], "findings": []}
    return {**judge(truth, said, path), "seconds": time.perf_counter() - began}


def judge(truth: dict[str, Any], said: dict[str, Any], path: Path) -> dict[str, Any]:
    """Whether the verdict, and the cause and place of the first finding, are right."""
    first = (said["findings"] or [{"cause": "", "line": 0, "file": ""}])[0]
    cause, verdict = first["cause"], said["verdict"]
    line = first["line"] if first["file"] and Path(first["file"]).resolve() == path.resolve() else 0
    row = {"id": truth["id"], "verdict": verdict, "cause": cause, "line": line}
    if truth["control"]:
        return {**row, "right": verdict == "healthy", "placed": verdict == "healthy"}
    placed = line in truth["places"]
    any_cause = verdict in truth["causes"] and placed  # no id fits: what is found at the place is right
    right = verdict == truth["verdict"] and (cause in truth["causes"] or any_cause)
    return {**row, "right": right, "placed": right and placed}


def score(folder: Path, processes: int) -> None:
    """Score every script of a folder, and print the table."""
    truths = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]
    kept = folder / "scores.jsonl"
    done = {row["id"]: row for row in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    left = [truth for truth in truths if truth["id"] not in done]
    with ThreadPoolExecutor(processes) as pool, kept.open("a", encoding="utf-8") as log:
        for answer in as_completed([pool.submit(score_one, truth, folder) for truth in left]):
            row = answer.result()
            done[row["id"]] = row
            log.write(json.dumps(row) + "\n")
            log.flush()
    _write_scores(folder, [(truth, done[truth["id"]]) for truth in truths])


def _write_scores(folder: Path, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    (folder / "scores.json").write_text(json.dumps([{**t, "said": row} for t, row in pairs], indent=1))
    print(table(pairs))


def play_round(asked: argparse.Namespace) -> None:
    """Make and score scripts in their order, each in a process of a few, until all are judged or time is up."""
    out, num, until = asked.out, asked.num, time.monotonic() + 60 * asked.minutes
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "scored.jsonl"
    left = [at for at in range(2 * num) if at not in _read_rows(kept)]
    # Each leads a group: with it ends what it has started.
    pool = ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn"), initializer=os.setpgrp)
    wait([pool.submit(_play_one, at, asked) for at in left], timeout=until - time.monotonic())
    running = [*(pool._processes or {}).values()]
    pool.shutdown(wait=False, cancel_futures=True)
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    rows = _read_rows(kept)
    beyond = next((at for at in range(2 * num) if at not in rows), 2 * num)
    counted = [rows[at] for at in range(beyond)]
    pairs = [({k: v for k, v in row.items() if k != "said"}, row["said"]) for row in counted if "said" in row]
    undrawn = [f"{row['id']}: {row['undrawn']}" for row in counted if "undrawn" in row]
    print(f"{len(rows)} of {2 * num} scripts done; the first {beyond} count, {len(undrawn)} of them without a draw")
    _write_scores(out, pairs)
    print("\n".join(undrawn))


def _read_rows(kept: Path) -> dict[int, dict[str, Any]]:
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    return {int(row["id"]): row for row in map(json.loads, lines)}


def _play_one(at: int, asked: argparse.Namespace) -> None:
    """Make one script and score it; the row is written when it is judged."""
    from tests.plants.check import Checker

    out, path, row = asked.out, asked.out / f"{at:04d}.json", {"id": f"{at:04d}"}
    try:
        known = json.loads(path.read_text()) if path.exists() else None
        truth = known or _make_one(out, at, asked.seed, Checker(out / "hosts"), asked.only)
        said = None if truth is None else score_one(truth, out, asked.limit)
        row |= {"undrawn": "no draw did what it says"} if truth is None else {**truth, "said": said}
    except Exception as error:  # of this script alone
        row |= {"undrawn": f"{type(error).__name__}: {error}"[:200]}
    with (out / "scored.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(row) + "\n")


def table(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """The score as Markdown."""
    plants = [(truth, row) for truth, row in pairs if not truth["control"]]
    lines = ["| | cause right | place right |", "|---|---|---|"]
    for name, group in (
        ("all plants", plants),
        ("silent", [pair for pair in plants if not pair[0]["loud"]]),
        ("loud", [pair for pair in plants if pair[0]["loud"]]),
    ):
        right, placed = (sum(row[key] for _, row in group) for key in ("right", "placed"))
        lines.append(f"| {name} | {right} of {len(group)} | {placed} of {len(group)} |")
    controls = [row for truth, row in pairs if truth["control"]]
    lines.append(f"| false alarms among controls | {sum(not row['right'] for row in controls)} of {len(controls)} | |")
    if pairs:
        lines.append(f"| median seconds | {statistics.median(row['seconds'] for _, row in pairs):.1f} | |")
    lines += ["", "| missed | host | hazard | dtype | expected | said |", "|---|---|---|---|---|---|"]
    for truth, row in pairs:
        if not row["placed"]:
            expected = f"{' or '.join(truth['causes']) or 'healthy'} at {truth['places']}"
            said = f"{row['verdict']}: {row['cause'] or 'nothing'} at {row['line']}"
            cells = (truth["id"], truth["host"], truth["hazard"], truth["dtype"], expected, said)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page(folders: list[Path]) -> None:
    """Write the scores of some folders into the page, in their order."""
    parts = [INTRO]
    for folder in folders:
        rows = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        pairs = [({key: value for key, value in row.items() if key != "said"}, row["said"]) for row in rows]
        parts.append(f"### Seed {rows[0]['seed']}\n\n{table(pairs)}\n")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = "\n".join(parts)
    PAGE.write_text(f"{before.rstrip()}\n\n{BEGIN}\n\n{text}\n{END}\n{after}", encoding="utf-8")


def main() -> None:
    """Make or score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("--seed", type=int, default=0)
    making.add_argument("--num", type=int, default=300, help="Plants, and as many controls.")
    making.add_argument("--out", type=Path, required=True)
    making.add_argument("--only", default="", help="Hazards whose names hold this text.")
    scoring = commands.add_parser("score")
    scoring.add_argument("folder", type=Path)
    scoring.add_argument("--processes", type=int, default=1)
    playing = commands.add_parser("round")
    playing.add_argument("--seed", type=int, required=True)
    playing.add_argument("--num", type=int, default=150, help="Plants, and as many controls.")
    playing.add_argument("--out", type=Path, required=True)
    playing.add_argument("--processes", type=int, default=1)
    playing.add_argument("--minutes", type=float, default=60.0, help="No more than these.")
    playing.add_argument("--limit", type=float, default=600.0, help="Seconds of a diagnosis: more is no answer.")
    playing.add_argument("--only", default="", help="Hazards whose names hold this text.")
    paging = commands.add_parser("page")
    paging.add_argument("folders", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.command == "make":
        make(asked.seed, asked.num, asked.out, asked.only)
    elif asked.command == "round":
        play_round(asked)
    elif asked.command == "page":
        write_page(asked.folders)
    else:
        score(asked.folder, asked.processes)


if __name__ == "__main__":
    main()
