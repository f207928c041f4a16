"""The fault campaign: planted faults of every kind, and whether a guarded run comes out of them with the right bits."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes are many, and a fork wants one thread
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # more processes than a machine has GPUs, and gloo: on the CPU

from campaign.groups import PATIENCE
from campaign.judge import GOOD, Verdict
from campaign.plan import KINDS, draw_faults
from campaign.session import Result, run_campaign
from campaign.table import render

RESULT = Path(__file__).parent / "results/faults_cpu.md"


def main() -> int:
    """Plant, judge, print the table; 1 where a run did not come out of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=1050, help="faults; each kind has one at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="plant no other kind")
    parser.add_argument("--processes", type=int, default=1, help="parts of the campaign that run at once")
    parser.add_argument("--part", default="0/1", help="which part of how many; for --processes")
    parser.add_argument("--results", type=Path, help="write each result as a line of JSON")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds after which a run counts as hanging")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--verbose", action="store_true", help="print each result")
    options = parser.parse_args()
    faults = draw_faults(options.seed, options.num, only=options.only)
    part, parts = map(int, options.part.split("/"))
    began = time.monotonic()
    memory = Path("/dev/shm")  # thousands of files are synced
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory if memory.is_dir() else None) as room:
        lines = Path(room) / "results.jsonl"
        if options.processes > 1:
            run_parts(options, lines)
        else:
            with lines.open("w") as file:
                run_campaign(
                    faults[part::parts],
                    Path(room) / "runs",
                    patience=options.patience,
                    tell=lambda result: tell(result, file, verbose=options.verbose),
                )
        text = lines.read_text("utf-8")
    if options.results is not None:
        options.results.write_text(text)
    rows = [json.loads(line) for line in text.splitlines()]
    kept = [(faults[row["number"]], Verdict(**row["verdict"])) for row in rows]
    command = f"python benchmarks/faults.py --seed {options.seed} --num {options.num}"
    command += f" --only {options.only}" if options.only else ""
    page = render(kept, command=command, seconds=time.monotonic() - began, processes=options.processes)
    if parts == 1:
        print(page)
    if options.write:
        RESULT.write_text(page + "\n", encoding="utf-8")
    return int(any(verdict.outcome not in GOOD for _, verdict in kept) or len(kept) != len(faults[part::parts]))


def tell(result: Result, file, *, verbose: bool) -> None:
    """One result, as a line."""
    row = {"number": result.fault.number, "verdict": asdict(result.verdict), "seconds": round(result.seconds, 3)}
    file.write(json.dumps(row) + "\n")
    file.flush()
    if verbose or result.verdict.outcome not in GOOD:
        setting = result.fault.setting
        words = f"{result.fault.number} {result.fault.kind} {setting.layout}/{setting.world} {setting.plan}"
        print(f"{words}: {result.verdict.outcome}, {result.verdict.note} ({result.seconds:.2f} s)", file=sys.stderr)


def run_parts(options: argparse.Namespace, lines: Path) -> None:
    """Run every part in a process of its own, and put their results together."""
    command = [sys.executable, __file__, "--num", str(options.num), "--seed", str(options.seed)]
    command += ["--patience", str(options.patience)] + (["--only", options.only] if options.only else [])
    command += ["--verbose"] if options.verbose else []
    files = [lines.with_name(f"part-{part}.jsonl") for part in range(options.processes)]
    children = [
        subprocess.Popen([*command, "--part", f"{part}/{options.processes}", "--results", str(file)])
        for part, file in enumerate(files)
    ]
    for child in children:
        child.wait()
    lines.write_text("".join(file.read_text("utf-8") for file in files if file.exists()))


if __name__ == "__main__":
    sys.exit(main())
