"""Rescues the scripts of tests/scripts/rescued by one command each, and says what came of it.

    python tools/score_script_rescues.py [PREFIX ...] [--processes N] [--limit SECONDS] [--out FILE]

A line for each as it ends, and all of them as JSON Lines in FILE. With --limit a rescue is ended as by Ctrl-C after so
many seconds, and counts as not finished.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.scripts.planted import Planted, make_script  # noqa: E402
from tests.scripts.rescued.failures import HERE, RESCUES  # noqa: E402


def rescue(planted: Planted, limit: float | None) -> dict[str, Any]:
    """What one command says of a script, and whether it left the script alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_script(planted, Path(folder), scripts=HERE)
        before = path.read_text(encoding="utf-8")
        words = [sys.executable, "-m", "floatline", "rescue", "--format", "json", "--as", "cuda", "--", sys.executable]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        run = subprocess.Popen(
            [*words, path.name, *planted.arguments],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        try:
            out, err = run.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)
            out, err = run.communicate()
        row = {"name": f"{planted.script}/{planted.name}", "exit": run.returncode, "cause": planted.cause}
        row["seconds"] = round(time.monotonic() - began)
        row["script_untouched"] = path.read_text(encoding="utf-8") == before
        try:
            found = json.loads(out)
        except json.JSONDecodeError:
            last = err.strip().splitlines()
            return {**row, "outcome": "not finished", "words": last[-1] if last else ""}
    tried = found["tried"]
    keeps_up = bool(tried) and tried[-1]["shortfall"] == ""
    verdict = found["verdict"]
    return {**row, "outcome": found["outcome"], "keeps_up": keeps_up, "verdict": verdict, "words": found["words"]}


def main() -> int:
    """Run them all; 0 when each was told something and no script was changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefixes", nargs="*", default=[""])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    asked = [one for one in RESCUES if f"{one.script}/{one.name}".startswith(tuple(given.prefixes))]
    rows = []
    with ThreadPoolExecutor(given.processes) as pool:
        for done in as_completed([pool.submit(rescue, one, given.limit) for one in asked]):
            rows.append(row := done.result())
            print(f"{row['name']:<42} {row['outcome']:<13} {row.get('verdict') or '':<13} {row['seconds']:>4} s  "
                  f"{row['words'][:110]}", flush=True)  # fmt: skip
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    keep = sum(row.get("keeps_up", False) for row in rows)
    passed = sum(row.get("verdict") == "PASS" for row in rows)
    print(f"{len(rows)} scripts: {keep} keep up with FP32, {passed} of them PASS")
    return 0 if all(row["script_untouched"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
