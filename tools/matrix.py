"""Runs tests with other Pythons, torches and frameworks, one after the other, and writes docs/compatibility.md's table.

    python tools/matrix.py                               # all of it: half an hour to an hour on two cores
    python tools/matrix.py --python 3.10 --torch 2.6.0   # one row of it

Each environment is made with uv in a folder of its own and deleted after its tests. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

import bootstrap
import oldest

PAGE = bootstrap.ROOT / "docs" / "compatibility.md"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.6.0", "2.9.1", "2.13.0")
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "ml-dtypes")
# What depends on torch's inside and on Python, as far as one minute of one core goes.
CORE = (
    "tests/numerics/test_foreach.py",
    "tests/numerics/test_rounding.py",
    "tests/numerics/test_split.py",
    "tests/optim/test_checkpoint.py",
    "tests/optim/test_layouts.py",
    "tests/optim/test_manners.py",
    "tests/optim/test_roster.py",
    "tests/optim/test_skip.py",
    "tests/optim/test_survey.py",
    "tests/guard/test_guard.py",
    "tests/precision/test_islands.py",
    "tests/guard/test_scaler.py",
    "tests/guard/recovery/test_schedules.py",
    "tests/guard/step/test_take_step.py",
    "tests/guard/step/test_unscaling.py",
    "tests/ledger/test_following.py",
    "tests/probe/steps/test_precision.py",
    "tests/probe/trace/test_recorder.py",
    "tests/probe/trace/test_twins.py",
    "tests/probe/watch/test_watch.py",
    "tests/diagnosis/detectors/test_births.py::test_a_failing_step_has_its_cause_and_place",
    "tests/numerics/test_cuda_autocast.py",
    "tests/numerics/test_half_on_cpu.py",
    "tests/base/test_private_names.py",
)
QUICK = (
    "tests/numerics/test_foreach.py",
    "tests/optim/test_checkpoint.py",
    "tests/optim/test_roster.py",
    "tests/optim/test_skip.py",
    "tests/optim/test_survey.py",
    "tests/guard/test_guard.py",
    "tests/precision/test_islands.py",
    "tests/guard/test_scaler.py",
    "tests/guard/recovery/test_schedules.py",
    "tests/guard/step/test_take_step.py",
    "tests/guard/step/test_unscaling.py",
    "tests/ledger/test_following.py",
    "tests/probe/steps/test_precision.py",
    "tests/probe/trace/test_twins.py",
    "tests/probe/watch/test_watch.py",
    "tests/diagnosis/detectors/test_births.py::test_a_failing_step_has_its_cause_and_place[softmax_by_hand]",
    "tests/numerics/test_half_on_cpu.py",
    "tests/base/test_private_names.py",
)
# The sources are the same everywhere, and so is what the command line says.
ONCE = (
    "tests/base/test_private_names.py::test_every_private_name_in_the_sources_is_listed",
    "tests/base/test_private_names.py::test_every_listed_name_is_in_the_sources",
    "tests/base/test_private_names.py::test_a_name_without_a_fallback_is_one_line_on_the_command_line",
    "tests/base/test_private_names.py::test_the_page_shows_the_list",
)
PROCESSES = (
    "tests/guard/test_guard_ranks.py",
    "tests/guard/test_scaler_ranks.py",
    "tests/precision/test_applied_plan_ranks.py",
    "tests/optim/test_distributed.py",
)
HEAD = "| Python | torch | what | passed | failed | skipped | date |\n|---|---|---|---|---|---|---|\n"


@dataclass(frozen=True, order=True)
class Row:
    """One environment, and what its tests came to.

    Args:
        python: Such as '3.10'.
        torch: Such as '2.6.0'.
        what: 'core' or 'quick', 'processes' for runs on two and four of them, 'oldest' or 'newest' frameworks.
    """

    python: str
    torch: str
    what: str = "core"

    def packages(self) -> list[str]:
        """What uv installs: floatline from this checkout, and what this row is about."""
        frameworks = self.what in ("oldest", "newest")
        extras = "torch,hf,lightning" if frameworks else "torch"
        return ["-e", f".[{extras}]", f"torch=={self.torch}", *TOOLS, *(pinned(self.what) if frameworks else ())]

    def tests(self) -> list[str]:
        """What pytest runs."""
        if self.what in ("core", "quick"):
            return [*(CORE if self.what == "core" else QUICK), *(f"--deselect={name}" for name in ONCE)]
        return list(PROCESSES) if self.what == "processes" else [f"tests/integrations/{name}" for name in oldest.TESTS]


def rows() -> list[Row]:
    """All environments: every torch on every Python; more where both are oldest, newest, or in between."""
    ends = (("3.10", "2.6.0"), ("3.12", "2.9.1"), ("3.13", "2.13.0"))
    plain = [Row(python, torch) for torch in TORCHES for python in PYTHONS]
    plain = [row if (row.python, row.torch) in ends else replace(row, what="quick") for row in plain]
    processes = [Row(*end, "processes") for end in ends]
    frameworks = [Row(*end, what) for end, what in zip(ends, ("oldest", "newest", "newest"), strict=True)]
    return [*plain, *processes, *frameworks]


def pinned(what: str) -> list[str]:
    """The versions in the constraints files; torch's is the row's own."""
    name = "constraints-oldest.txt" if what == "oldest" else "constraints.txt"
    lines = (bootstrap.ROOT / name).read_text("utf-8").splitlines()
    wanted = ("accelerate", "lightning", "peft", "pytorch-lightning", "transformers", "trl")
    return [line for line in lines if line.partition("==")[0] in wanted]


def uv() -> str:
    """The uv of .venv, or the one on the path."""
    own = bootstrap.PYTHON.with_name("uv")
    found = str(own) if own.exists() else shutil.which("uv")
    if found is None:
        sys.exit("matrix: there is no uv. Run `make lint` once, which sets up .venv with it.")
    return found


def run(row: Row, folder: Path) -> tuple[str, str, str]:
    """Passed, failed and skipped, for the table; or why there are none."""
    env = {**bootstrap.environment(), "UV_COMPILE_BYTECODE": "0", "OMP_NUM_THREADS": "1"}
    for name in ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"):  # tests start many processes, which load torch
        env.pop(name, None)
    python = folder / "bin" / "python"
    made = [uv(), "venv", "--quiet", "--clear", "--python", row.python, str(folder)]
    installed = [uv(), "pip", "install", "--quiet", "--python", str(python), *row.packages()]
    for command in (made, installed):
        if subprocess.run(command, cwd=bootstrap.ROOT, env=env, check=False).returncode:
            return "did not install", "", ""
    report = folder / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-m", "not gpu", f"--junitxml={report}"]
    subprocess.run([str(python), "-m", "pytest", *options, *row.tests()], cwd=bootstrap.ROOT, env=env, check=False)
    if not report.exists():
        return "did not run", "", ""
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).iter("testsuite"):
        counts = {key: value + int(suite.get(key, 0)) for key, value in counts.items()}
    failed = counts["failures"] + counts["errors"]
    return f"{counts['tests'] - failed - counts['skipped']:,}", f"{failed:,}", f"{counts['skipped']:,}"


def write(row: Row, found: tuple[str, str, str]) -> None:
    """Put one row into the page's table, in its place, and leave the others."""
    text = PAGE.read_text("utf-8")
    before, rest = text.split(HEAD)
    table, blank, after = rest.partition("\n\n")
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    kept = {tuple(cell.strip() for cell in line.split("|")[1:4]): line for line in table.splitlines() if line}
    line = f"| {row.python} | {row.torch} | {row.what} | {found[0]} | {found[1]} | {found[2]} | {today} |"
    kept[row.python, row.torch, row.what] = line
    order = [(other.python, other.torch, other.what) for other in rows()]
    lines = sorted(kept.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    PAGE.write_text(before + HEAD + "\n".join(line for _, line in lines) + (blank or "\n") + after, "utf-8")


def main() -> int:
    """Run the rows that are asked for; 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", choices=PYTHONS, action="append", help="only this one; may be given again")
    parser.add_argument("--torch", choices=TORCHES, action="append", help="only this one; may be given again")
    parser.add_argument("--what", choices=("core", "quick", "processes", "oldest", "newest"), action="append")
    asked = parser.parse_args()
    bad = False
    for row in rows():
        wanted = ((row.python, asked.python), (row.torch, asked.torch), (row.what, asked.what))
        if any(only and value not in only for value, only in wanted):
            continue
        print(f"matrix: Python {row.python}, torch {row.torch}, {row.what}", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="floatline-matrix-") as folder:
            found = run(row, Path(folder) / "env")
        write(row, found)
        bad = bad or found[1] != "0"
        print(f"matrix: {', '.join(filter(None, found))}, {time.monotonic() - began:.0f} s", flush=True)
    return int(bad)


if __name__ == "__main__":
    os.chdir(bootstrap.ROOT)
    sys.exit(main())
