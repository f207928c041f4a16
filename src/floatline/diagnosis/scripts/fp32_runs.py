"""FP32Runs: the losses of a script in FP32, with its own texts and with changed ones. Without torch."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from floatline.diagnosis.fix_trials import FP32Run, run_quietly
from floatline.plans.presets import resolve_plan
from floatline.running.command import Command, trial_environment

MOST_STEPS = 40
_SEED = 0


class FP32Runs:
    """Runs a script in FP32 for some steps, from the same seed; what it writes is kept apart. Its own run is made once.

    Args:
        command: The script.
        device: 'cuda' stands in for a GPU where there is none; '' does not.
        steps: Of a trial; no run takes more than MOST_STEPS.
    """

    def __init__(self, command: Command, device: str, steps: int) -> None:
        self._command, self._device, self._steps = command, device, min(steps, MOST_STEPS)
        self._original: FP32Run | None = None

    def run(self, sources: Mapping[str, str]) -> FP32Run:
        """The script with changed texts, by path; none are the script as it is."""
        if sources:
            return self._run(sources)
        self._original = self._original or self._run({})
        return self._original

    def _run(self, sources: Mapping[str, str]) -> FP32Run:
        with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
            names = ("report.json", "job.json", "losses.jsonl", "writes")
            report, task, log, writes = (Path(folder, name) for name in names)
            writes.mkdir()
            job = {
                "plan": resolve_plan("fp32").as_given(), "sources": dict(sources), "steps": self._steps,
                "seed": _SEED, "log": str(log), "folder": str(writes), "device": self._device,
            }  # fmt: skip
            task.write_text(json.dumps(job), encoding="utf-8")
            start = self._command.inside("floatline.running.main", str(report), f"@{task}")
            with trial_environment(writes) as environment:
                problem = run_quietly(start, env=environment)
            seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
            lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        if not seen or "missing" in seen:
            return FP32Run(problem=problem or "the process in FP32 ended without a word")
        if seen["refused"]:
            return FP32Run(problem=f"the script cannot run beside its own files, {seen['refused'][0]}")
        losses = [math.nan if loss is None else float(loss) for loss in (json.loads(line)["loss"] for line in lines)]
        return FP32Run((*losses, math.nan) if seen["exit_code"] else tuple(losses))
