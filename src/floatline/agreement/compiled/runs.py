"""Compiled code of a script or a target compared: a few steps are run, and whatever happens is said, not raised."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from floatline.agreement.compiled.compiled_report import CompiledReport
from floatline.running.command import parse_launched, run_quietly, trial_environment

_MAIN = "floatline.agreement.compiled.script_main"


def compare_compiled_script(
    words: Sequence[str], *, backend: str | None = None, folder: str | Path | None = None
) -> CompiledReport:
    """Run a command for a few steps in a process of its own, and compare what it compiles with eager code and FP32.

    Its output is not shown, and what it writes is kept apart.

    Args:
        words: The command.
        backend: What to compile with; None: what the script compiles with, or Inductor.
        folder: Where a reproducer goes; None writes none.
    """
    command = parse_launched(list(words))
    if command.launcher:
        return CompiledReport.of_problem("a command that starts several processes is not compared; give it one")
    with tempfile.TemporaryDirectory(prefix="floatline-") as temporary:
        report, writes = Path(temporary, "report.json"), Path(temporary, "writes")
        writes.mkdir()
        out = None if folder is None else str(Path(folder).absolute())
        job = json.dumps({"writes": str(writes), "backend": backend, "out": out})
        with trial_environment(writes) as environment:
            late = run_quietly(command.inside(_MAIN, str(report), job), env=environment)
        if not report.exists():
            return CompiledReport.of_problem(late or "the process ended without a word")
        found = json.loads(report.read_text(encoding="utf-8"))
    if "missing" in found:
        return CompiledReport.of_problem(f"{command.python} cannot import {found['missing']}. Install it there.")
    return CompiledReport(**found)


def compare_compiled_target(
    text: str, *, seed: int = 0, backend: str | None = None, folder: str | Path | None = None
) -> CompiledReport:
    """Run a target for a few steps, and compare its last one compiled with eager code and FP32.

    Args:
        text: As `diagnose` takes it.
        seed: Of the run.
        backend: What to compile with; None: what the target compiles with, or Inductor.
        folder: Where a reproducer goes; None writes none.

    Raises:
        TargetError: There is no such target.
    """
    from floatline.agreement.compiled.target_graphs import compare_build, compare_train
    from floatline.workload.target import load_target

    target = load_target(text)
    compare = compare_train if target.builder is None else compare_build
    try:
        return compare(target, seed=seed, backend=backend, folder=folder).report()
    except Exception as error:  # it is one question of several, and the others have their answers
        with suppress(Exception):
            return CompiledReport.of_problem(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        raise
