"""The process in which a script runs until one of its steps is measured; its manifest is written as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from floatline.manifests.manifest import Manifest
from floatline.manifests.measured_step import MeasuredStep
from floatline.manifests.surroundings import find_bad_loss
from floatline.precision.user_frames import find_script_line
from floatline.probe.runs.cuda_on_cpu import as_cuda
from floatline.probe.scripts.run import run_prepared
from floatline.probe.watch.watch import watch
from floatline.running.ranks import count_beside, own_path, wait_for_others


def main(report: str, job: str, words: list[str]) -> None:
    """Run a script until a step is measured, and end it there.

    What a script does at its end, such as saving what it has trained, is not done: it has not trained. A process of
    several waits for the others before it ends, so that what it still has to send reaches them.

    Args:
        report: Where the JSON goes; each of several processes writes its own, see `path_of`.
        job: JSON: `steps`, the number of the step that is measured, and `device`, 'cuda' where that stands in.
        words: The script's file, or `-m` and a module, and its arguments.
    """
    given: dict[str, Any] = json.loads(job)
    process, path = os.getpid(), own_path(Path(report))

    def end(found: Manifest) -> None:
        if os.getpid() == process:
            _write(path, {"manifest": found.as_json(), "exit_code": 0})
            wait_for_others(Path(report))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    with as_cuda() if given["device"] else contextlib.nullcontext(""), watch(light=True) as seen:
        measured = MeasuredStep(seen, first=given["steps"], on_done=end)
        seen.listener, seen.locate = measured, find_script_line
        ended = run_prepared(words)
        measured.end()
        bad = find_bad_loss(seen)
    if os.getpid() == process:
        num, skipped = max(measured.num_applied, default=0), measured.num_skipped
        counts = {"num_steps": num, "num_skipped": skipped, "bad_loss": bad, "num_beside": count_beside()}
        _write(path, {"manifest": None, "exit_code": ended.exit_code, **counts, "notes": measured.notes})
    sys.exit(ended.exit_code)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.with_suffix(".new").write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    path.with_suffix(".new").replace(path)
