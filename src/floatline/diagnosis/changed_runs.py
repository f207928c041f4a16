"""Changed runs: a target looked at again in a process of its own, with texts that its files do not hold yet."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import floatline
from floatline.base.patched_sources import patch_sources
from floatline.errors import FloatlineError
from floatline.running.command import run_quietly

_START = """
import json, sys
job = json.load(open(sys.argv[1]))
sys.path.append(job["home"])
from floatline.diagnosis.changed_runs import answer_job
answer_job(job)
"""


def run_changed(module: str, sources: Mapping[str, str], **fields: Any) -> dict[str, Any] | str:
    """Have a module look at changed texts; gives what it says, or why it says nothing.

    Args:
        module: One of floatline's, with `diagnose_changed(job)`, which gives plain data.
        sources: Texts by path.
        fields: What else the job says.
    """
    with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
        report, job = Path(folder, "report.json"), Path(folder, "job.json")
        home = str(Path(floatline.__file__).parents[1])
        known = {"home": home, "report": str(report), "module": module, "sources": dict(sources)}
        job.write_text(json.dumps(known | fields), encoding="utf-8")
        problem = run_quietly([sys.executable, "-c", _START, str(job)])
        if not report.exists():
            return problem or "the process that tried it ended without a word"
        return json.loads(report.read_text(encoding="utf-8"))


def answer_job(job: Mapping[str, Any]) -> None:
    """Do a job in this process, and write down what comes of it; 'error' where floatline refuses."""
    patch_sources(job["sources"])
    try:
        content: dict[str, Any] = importlib.import_module(job["module"]).diagnose_changed(job)
    except FloatlineError as error:
        content = {"error": str(error)}
    Path(job["report"]).write_text(json.dumps(content), encoding="utf-8")
