"""The process in which a script runs under a plan: puts it into force, runs the script, and writes what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from floatline.base.patched_sources import patch_sources
from floatline.errors import FloatlineError
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.plans import Plan
from floatline.probe.runs.cuda_on_cpu import as_cuda
from floatline.probe.scripts.kept_writes import KeptWrites
from floatline.probe.scripts.run import prepare_script, read_exit_code
from floatline.probe.watch.patches import Patches
from floatline.running.loss_log import EnoughSteps, LossLog
from floatline.running.nudge import Nudge
from floatline.running.outside_scale import OutsideScale
from floatline.running.plan_in_force import PlanInForce, enter_lines, plan_in_force
from floatline.running.ranks import own_path, read_number, wait_for_others
from floatline.running.read_values import ReadValues
from floatline.running.seeds import Seeds
from floatline.running.tracebacks import hide_own_frames


def main(report: str, job: str, words: list[str]) -> None:
    """Run a script under a plan to its end; the process ends as the script would have.

    Args:
        report: Where the JSON goes; '' writes none.
        job: JSON, or '@' and a file that holds it, since texts may be too long for a command line: `plan`; `seed` and
            `shift`; `steps`, after which the script is ended; `log`, where losses go; `folder`, where writes of the
            script go; `sources`, texts that are imported instead of files; `device`; `nudge`, a share by which its
            weights are moved once; `reads`, where the numbers go that it reads; `lines`, files and lines that compute
            in FP32; `search`, the steps that each optimizer leaves out. Only the plan is needed; null runs the
            script as it is.
        words: The script's file, or `-m` and a module, and its arguments.
    """
    text = Path(job[1:]).read_text(encoding="utf-8") if job.startswith("@") else job
    given: dict[str, Any] = json.loads(text)
    given |= {name: str(own_path(Path(given[name]))) for name in ("log", "reads") if given.get(name)}
    run = _Run(given, words)
    if not given.get("folder"):
        run.run(_Nothing())
        run.finish(report)
        sys.exit(run.exit_code)
    writes = KeptWrites(Path(given["folder"]))
    run.run(writes.kept())
    run.finish(report, refused=writes.refused)
    if report:
        wait_for_others(Path(report))
    sys.stdout.flush()
    os._exit(0 if run.exit_code == 0 else run.exit_code)  # what it does at its end is not kept apart any more


_Nothing = contextlib.nullcontext


class _Run:
    def __init__(self, given: dict[str, Any], words: list[str]) -> None:
        self._given, self._words = given, words
        self._plan = None if given["plan"] is None else Plan(**given["plan"])
        self._log: LossLog | None = None
        if given.get("log"):
            self._log = LossLog(Path(given["log"]), most=given.get("steps"), measures=given.get("sizes", False))
        self._seeds = Seeds(given.get("seed"), shift=given.get("shift", 0))
        self._reads = ReadValues()
        self._force: PlanInForce | None = None
        self._error, self._refused, self._cut = "", False, False
        self.exit_code = 0

    def run(self, around: contextlib.AbstractContextManager[Any]) -> None:
        patch_sources(self._given.get("sources", {}))
        try:
            with self._conditions(), around:
                self._run_script()
        except FloatlineError as error:
            self._refuse(error)

    def _run_script(self) -> None:
        try:
            prepare_script(self._words)()
        except SystemExit as end:
            self.exit_code = read_exit_code(end)
        except EnoughSteps:
            self._cut = True
        except KeyboardInterrupt:
            self.exit_code = 130
        except FloatlineError as error:
            self._refuse(error)
        except BaseException as error:
            self.exit_code = 1
            self._error = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            hide_own_frames(error)
            sys.excepthook(type(error), error, error.__traceback__)
        if self._log is not None:
            self._log.end()

    def _refuse(self, error: FloatlineError) -> None:
        self.exit_code, self._error, self._refused = 2, str(error), True
        sys.stderr.write(f"floatline: {error}\n")

    @contextlib.contextmanager
    def _conditions(self) -> Generator[None]:
        patches = Patches()
        with contextlib.ExitStack() as stack:
            stack.callback(patches.undo)
            if self._given.get("device"):
                stack.enter_context(as_cuda())
            elif not torch.cuda.is_available() and self._needs_half():
                stack.enter_context(HalfOnCPU())
            self._seeds.begin(patches)
            if self._given.get("reads"):
                self._reads.patch(patches)
            if self._given.get("nudge"):
                Nudge(self._given["nudge"]).patch(patches)
            if self._given.get("lines"):
                enter_lines(stack, patches, {(file, line) for file, line in self._given["lines"]}, widens=True)
            if self._plan is None:
                if self._log is not None:
                    stack.callback(self._log.patch_bare(patches))
                yield
                return
            if self._log is not None:
                self._log.patch(patches)
            self._force = stack.enter_context(plan_in_force(self._plan, self._hear))
            self._force.scale.search = list(self._given.get("search", ()))
            yield

    def _needs_half(self) -> bool:
        """Whether 16 bits are to be fast on a CPU; not in a run that is held against one without that."""
        return (self._plan is None or self._plan.compute != "fp32") and "lines" not in self._given

    def _hear(self, optimizer: Optimizer, applied: bool) -> None:
        if self._log is not None:
            self._log.step(optimizer, applied)

    def finish(self, report: str, *, refused: list[str] | None = None) -> None:
        if self._given.get("reads"):
            self._reads.write(Path(self._given["reads"]))
        scale = None if self._force is None else self._force.scale
        if not report:
            if not read_number() and self._plan is not None and scale is not None and not self._refused:
                sys.stderr.write(f"floatline: {_sum_up(self._plan, scale)}\n")
            return
        content = {
            "exit_code": self.exit_code,
            "error": self._error,
            "cut": self._cut,
            "scale": 1.0 if scale is None else scale.scale,
            "first_scale": 1.0 if scale is None else scale.first_scale,
            "seeded": self._seeds.own,
            "refused": refused or [],
        }
        path = own_path(Path(report))
        path.with_suffix(".new").write_text(json.dumps(content), encoding="utf-8")
        path.with_suffix(".new").replace(path)


def _sum_up(plan: Plan, scale: OutsideScale) -> str:
    """One line on what was in force."""
    if not scale.num_steps:
        return f"no optimizer made a step under plan '{plan.name}'."
    text = f"{scale.num_steps:,} steps under plan '{plan.name}'"
    if plan.scaling is None:
        return f"{text}."
    return f"{text}, {scale.num_skipped:,} of them left out; the loss scale ended at {scale.scale:g}."
