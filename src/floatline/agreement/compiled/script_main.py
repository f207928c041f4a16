"""The process in which a script's compiled code is compared: a few steps of it, their graphs, and JSON of what came."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from floatline.agreement.compiled.backends import Compiler
from floatline.agreement.compiled.script_graphs import ScriptGraphs
from floatline.agreement.compiled.step_result import CompiledStep
from floatline.agreement.compiled.steps import compare_graphs
from floatline.base.files import write_whole
from floatline.probe.scripts.kept_writes import KeptWrites
from floatline.probe.scripts.run import run_prepared
from floatline.running.loss_log import EnoughSteps
from floatline.running.seeds import seed_all


def main(report: str, job: str, words: list[str]) -> None:
    """Run a script for some steps, compare what was compiled, and end the process.

    Args:
        report: Where the JSON goes, whenever something is known.
        job: JSON: `writes`, the folder that its writes go to; `backend`, what to compile with, or null; `out`, the
            folder of a reproducer, or null.
        words: The script's file, or `-m` and a module, and its arguments.
    """
    given: dict[str, Any] = json.loads(job)
    seen, writes = ScriptGraphs(), KeptWrites(Path(given["writes"]))
    problem = ""
    with writes.kept(), seen.seeing():
        seed_all(0)
        ended = run_prepared(words)
        if ended.error is not None and not isinstance(ended.error, EnoughSteps):
            problem = f"it ended with {type(ended.error).__name__} after {seen.num_steps} steps"
        elif writes.refused:
            problem = f"it cannot run beside its own files, {writes.refused[0]}"

    def write(found: CompiledStep) -> None:
        write_whole(Path(report), json.dumps(found.report().as_parts()))

    graphs = seen.graphs
    if problem and not graphs:
        write(CompiledStep(given["backend"] or Compiler().name, problem=problem))
    else:
        write(compare_graphs(graphs, backend=given["backend"], folder=given["out"], on_progress=write))
    os._exit(0)  # what the script does at its end is not kept apart any more
