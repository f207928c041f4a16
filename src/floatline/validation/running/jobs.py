"""Job: one seed of one arm, as plain data that another process can run."""

from __future__ import annotations

import dataclasses
import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from floatline.validation.verdict.pairs import ArmRun


@dataclass(frozen=True)
class Job:
    """One seed of one arm: all that another process needs to run it.

    Args:
        arm: Name of the arm.
        seed: Its seed.
        call: 'module:function' that runs it: it is called with this job, and gives its ArmRun. The function must be
            importable where the job runs. '' where `function` is given.
        settings: What the function needs, as plain JSON data.
        function: Runs it in this process instead, one at a time; such a job cannot be sent anywhere.
    """

    arm: str
    seed: int
    call: str = ""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    function: Callable[[int], ArmRun] | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data for a job file."""
        return {"arm": self.arm, "seed": self.seed, "call": self.call, "settings": self.settings}

    def run(self) -> ArmRun:
        """Run it here. Whatever it raises is the `error` of its run; Ctrl-C passes through."""
        began = time.monotonic()
        try:
            if self.function is not None:
                run: object = self.function(self.seed)
            else:
                module, _, name = self.call.partition(":")
                run = getattr(importlib.import_module(module), name)(self)
        except Exception as error:
            return failed_run(self, f"{type(error).__name__}: {_first_line(error)}")
        if not isinstance(run, ArmRun):
            return failed_run(self, f"its function gave a {type(run).__name__}, not an ArmRun")
        seconds = time.monotonic() - began if run.seconds is None else run.seconds
        # The name and the seed are the study's, whatever a function calls itself.
        return dataclasses.replace(run, arm=self.arm, seed=self.seed, seconds=seconds)


def failed_run(job: Job, error: str) -> ArmRun:
    """The run of a job that did not come to its end."""
    return ArmRun(job.arm, job.seed, math.nan, error=error)


def job_from_json(data: Any) -> Job:
    """The job that `as_json` wrote."""
    fields = cast("dict[str, Any]", data)
    return Job(fields["arm"], fields["seed"], fields["call"], fields["settings"])


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
