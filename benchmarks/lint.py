"""How fast `floatline lint` reads: lines for each second of one core over installed packages, beside parsing alone.

With folders, how long `--fix` takes there, beside linting.

python benchmarks/lint.py [--rounds N] [--write] [FOLDER]...
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import statistics
import time
from datetime import date
from pathlib import Path

from floatline.lint import RULES, lint_paths
from floatline.lint.paths import find_files

PACKAGES = ("transformers", "torch", "lightning", "peft", "accelerate", "torch_geometric")
RESULT = Path(__file__).parent / "results" / "lint_cpu.md"


def find_package(name: str) -> Path | None:
    """Where a package is installed."""
    spec = importlib.util.find_spec(name)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def parse_all(files: list[str]) -> float:
    """Seconds to read and parse every Python file: what no linter can do without."""
    started = time.process_time()
    for file in files:
        if file.endswith(".py"):
            try:
                ast.parse(Path(file).read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue
    return time.process_time() - started


def measure(folder: Path, rounds: int) -> tuple[int, float, float, int]:
    """Lines, seconds to lint, seconds to parse, findings."""
    files = find_files([folder])
    lint, parse, lines, found = [], [], 0, 0
    for _ in range(rounds):
        started = time.process_time()
        result = lint_paths([folder], jobs=1)
        lint.append(time.process_time() - started)
        parse.append(parse_all(files))
        lines, found = result.num_lines, len(result.findings)
    return lines, statistics.median(lint), statistics.median(parse), found


def measure_fix(folder: Path, rounds: int) -> tuple[int, int, float, float]:
    """Files that are changed, rewrites, seconds to lint, seconds to lint and fix."""
    lint, fix, changes, fixed = [], [], 0, 0
    for _ in range(rounds):
        started = time.process_time()
        lint_paths([folder], jobs=1)
        between = time.process_time()
        result = lint_paths([folder], jobs=1, fix=True)
        fix.append(time.process_time() - between)
        lint.append(between - started)
        changes, fixed = len(result.changes), len(result.fixed)
    return changes, fixed, statistics.median(lint), statistics.median(fix)


def lint_packages(rounds: int) -> list[str]:
    """A row for each package."""
    rows, all_lines, all_seconds = [], 0, 0.0
    for name in PACKAGES:
        folder = find_package(name)
        if folder is None:
            print(f"{name} is not installed")
            continue
        lines, lint, parse, found = measure(folder, rounds)
        all_lines, all_seconds = all_lines + lines, all_seconds + lint
        rows.append(f"| {name} | {lines:,} | {lines / lint:,.0f} | {lint / parse:.2f} | {found} |")
        print(rows[-1], flush=True)
    return [*rows, f"| all | {all_lines:,} | {all_lines / all_seconds:,.0f} | | |"]


def fix_folders(folders: list[Path], rounds: int) -> list[str]:
    """A row for each folder."""
    rows, all_lint, all_fix = [], 0.0, 0.0
    for folder in folders:
        changes, fixed, lint, fix = measure_fix(folder, rounds)
        all_lint, all_fix = all_lint + lint, all_fix + fix
        rows.append(f"| {folder.name} | {changes} | {fixed} | {lint:.2f} s | {fix:.2f} s | {fix / lint:.2f} |")
        print(rows[-1], flush=True)
    return [*rows, f"| all | | | {all_lint:.2f} s | {all_fix:.2f} s | {all_fix / all_lint:.2f} |"]


def main() -> None:
    """Measure every package and folder, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="where --fix is timed, too")
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is told")
    parser.add_argument("--write", action="store_true", help="keep the tables beside this script")
    given = parser.parse_args()
    rows, fixes = lint_packages(given.rounds), fix_folders(given.folders, given.rounds) if given.folders else []
    head = (
        f"# Lint: lines a second on one core\n\n{date.today()}, {len(RULES)} rules, rounds: {given.rounds} (median), "
        "processor time, one process. `python benchmarks/lint.py --write [FOLDER]...`\n\n"
        "| package | lines | lines a second | time, of parsing alone | findings |\n|---|---|---|---|---|\n"
    )
    if fixes:
        rows += ["", "`--fix` beside linting, in folders with something to fix:", ""]
        rows += [
            "| folder | files changed | rewrites | lint | lint --fix | times |",
            "|---|---|---|---|---|---|",
            *fixes,
        ]
    if given.write:
        RESULT.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
