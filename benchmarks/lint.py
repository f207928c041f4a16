"""How fast `floatline lint` reads: lines for each second of one core over installed packages, beside parsing alone.

python benchmarks/lint.py [--write]
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
ROUNDS = 3


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


def measure(folder: Path) -> tuple[int, float, float, int]:
    """Lines, seconds to lint, seconds to parse, findings."""
    files = find_files([folder])
    lint, parse, lines, found = [], [], 0, 0
    for _ in range(ROUNDS):
        started = time.process_time()
        result = lint_paths([folder], jobs=1)
        lint.append(time.process_time() - started)
        parse.append(parse_all(files))
        lines, found = result.num_lines, len(result.findings)
    return lines, statistics.median(lint), statistics.median(parse), found


def main() -> None:
    """Measure every package, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the table beside this script")
    write = parser.parse_args().write
    rows, all_lines, all_seconds = [], 0, 0.0
    for name in PACKAGES:
        folder = find_package(name)
        if folder is None:
            print(f"{name} is not installed")
            continue
        lines, lint, parse, found = measure(folder)
        all_lines, all_seconds = all_lines + lines, all_seconds + lint
        rows.append(f"| {name} | {lines:,} | {lines / lint:,.0f} | {lint / parse:.2f} | {found} |")
        print(rows[-1], flush=True)
    rows.append(f"| all | {all_lines:,} | {all_lines / all_seconds:,.0f} | | |")
    print(rows[-1])
    if write:
        head = (
            f"# Lint: lines a second on one core\n\n{date.today()}, {len(RULES)} rules, median of {ROUNDS} rounds of "
            "processor time, one process. `python benchmarks/lint.py --write`\n\n"
            "| package | lines | lines a second | time, of parsing alone | findings |\n|---|---|---|---|---|\n"
        )
        RESULT.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
