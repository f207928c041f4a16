"""Counts the files and functions of floatline that a reader walks through to follow one task from end to end.

    python tools/count_files.py                  # all tasks, each in a process of its own
    python tools/count_files.py step --files     # one of them, with the functions of every file

diagnose: a NaN in a training step, from `floatline diagnose --no-try` to the printed finding.
fix:      the same, and a change of the failing line proposed and tried, without what the trial's own process does.
step:     one `guard.step` that is applied and one that is skipped, from a loss to a line in the ledger; the guard is
          made and has made steps before.
Every function that ran counts, in whatever thread; what a module does while it is imported counts by its functions.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import floatline

CASE = Path(__file__).parents[1] / "tests" / "cases" / "031_adversary_log_one_minus.py"
SOURCE = str(Path(floatline.__file__).parent) + os.sep
# Parts of a function, which newer Pythons no longer call, and bodies of modules.
PARTS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>"}
FUNCTION = 0x0002  # CO_NEWLOCALS: not the body of a class


class Walk:
    """The functions that ran while it was counting, by file."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}
        self._counts = False

    def _hear(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self._counts or event != "call" or not code.co_filename.startswith(SOURCE):
            return
        if code.co_flags & FUNCTION and code.co_name not in PARTS:
            name = f"{code.co_name}:{code.co_firstlineno}"
            self.files.setdefault(code.co_filename[len(SOURCE) :], set()).add(name)

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Hear of every call from here on, in this thread and in those that are started."""
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextlib.contextmanager
    def counting(self) -> Generator[None]:
        """Count what is heard."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False


def diagnose(walk: Walk) -> None:
    """Diagnose a target whose loss becomes NaN in FP16."""
    _diagnose(walk, "--no-try")


def fix(walk: Walk) -> None:
    """Diagnose it, and try a change of its line."""
    _diagnose(walk, "--try")


def _diagnose(walk: Walk, option: str) -> None:
    from floatline.cli.main import main

    sys.argv = ["floatline", "diagnose", str(CASE), option]
    printed = io.StringIO()
    with walk.listening(), walk.counting(), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main()
    if "rounded-onto-singularity" not in printed.getvalue():
        raise SystemExit(f"{CASE.name} is diagnosed otherwise than expected:\n{printed.getvalue()}")


def step(walk: Walk) -> None:
    """Make one step that is applied and one that is skipped, until both are on the disk."""
    import torch

    from floatline import Guard, optim

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    batch = torch.randn(4, 8)

    def compute_loss(factor: float) -> torch.Tensor:
        return model(batch).square().mean() * factor

    with tempfile.TemporaryDirectory() as folder, walk.listening():
        with Guard(model, optim.AdamW(model.parameters()), folder=Path(folder) / "run") as guard:
            for _ in range(3):
                guard.step(compute_loss, 1.0)
            ledger = guard.ledger
            assert ledger is not None
            with walk.counting():
                applied, skipped = guard.step(compute_loss, 1.0), guard.step(compute_loss, float("inf"))
                ledger.flush()
        if not applied.applied or skipped.applied:
            raise SystemExit("One step was to be applied and the other one skipped.")


TASKS: dict[str, tuple[Callable[[Walk], None], str]] = {
    "diagnose": (diagnose, "a NaN from `floatline diagnose` to the printed finding"),
    "fix": (fix, "the same, with a change of the line that was tried"),
    "step": (step, "`guard.step` from a loss to a ledger line"),
}


def main(words: list[str] | None = None) -> None:
    """Count what is asked for, and print it."""
    parser = argparse.ArgumentParser(description="Count the files and functions that a task walks through.")
    parser.add_argument("task", nargs="?", choices=TASKS, help="The task to count; all, where none is named.")
    parser.add_argument("--files", action="store_true", help="Print the functions of every file.")
    asked = parser.parse_args(words)
    if asked.task is None:
        for task in TASKS:
            subprocess.run([sys.executable, __file__, task, *(["--files"] if asked.files else [])], check=True)
        return
    run, title = TASKS[asked.task]
    walk = Walk()
    run(walk)
    print(f"{title}: {len(walk.files)} files, {sum(map(len, walk.files.values()))} functions")
    if asked.files:
        for file in sorted(walk.files):
            print(f"  {file}: {', '.join(sorted(walk.files[file]))}")


if __name__ == "__main__":
    main()
