"""Diagnoser: a failed step of a guarded run explained while the run goes on, on copies and on a budget."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from floatline.causes import find_cause
from floatline.diagnosis.detectors.first_nonfinite import (
    Birth,
    find_births,
    find_unfit_constants,
    is_search,
    keep_harmful,
)
from floatline.diagnosis.detectors.kernels import find_wrong_kernels
from floatline.diagnosis.detectors.not_precision import first_birth_in_fp32, overflows
from floatline.errors import GuardError
from floatline.findings import Finding
from floatline.guard.failures import FailedStep
from floatline.optim.mesh import num_processes
from floatline.probe.steps.capture import CapturedStep, StepOrigin, capture_step
from floatline.probe.trace.trace import Trace

# What recording a step takes at most, as a multiple of its replay: 2 to 10 on a CPU, about 13 on an H200.
_TRACE_COST = 20.0


@dataclass(frozen=True)
class NamedFailure:
    """What was found of one failed step.

    Args:
        attempt: Number of the step.
        finding: Cause, place, numbers and fix.
        bundle: Where the step was written; None where it was not.
    """

    attempt: int
    finding: Finding
    bundle: Path | None = None


class Diagnoser:
    """Explains failed steps of a guarded run in place: `Guard(..., on_failure=Diagnoser())`.

    The failed step is captured, replayed, and recorded operation by operation beside FP32, all on copies: the run's
    weights, states and random numbers are not touched. A row of failed steps is looked at until its cause is named, and
    each cause and place is said once. Takes twice the memory of the weights for as long as it looks, and that of
    the recorder.

    Args:
        budget: Seconds it may take, counted over the run. It says when they are used up. One replay decides whether
            there is time enough to record the step, so that it may be passed by about one replay.
        folder: Where to write each named step as a replay bundle, 'step-00000012'; None writes none.
        with_data: Put the batches into the bundles.

    Attributes:
        named: What was found.
        seconds: Time that was taken.
    """

    def __init__(self, *, budget: float = 30.0, folder: str | Path | None = None, with_data: bool = False) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GuardError(f"budget is {budget!r}. Give seconds, 0 or more.")
        self.named: list[NamedFailure] = []
        self.seconds = 0.0
        self._budget = budget
        self._folder = None if folder is None else Path(folder)
        self._with_data = with_data
        self._said: set[object] = set()
        self._row_end = -1  # the last step of a row whose cause is known

    def __call__(self, failed: FailedStep) -> str | None:
        """Explain a failed step; gives what the ledger should say, or None."""
        if failed.outcome.attempt == self._row_end + 1:
            self._row_end += 1
            return None
        world = num_processes(failed.run.judge.group)
        if world > 1:
            words = f"not diagnosed: {world} processes train together, and a step is replayed on one"
            return self._once("processes", words)
        if self.seconds >= self._budget:
            return self._once("budget", f"not diagnosed: the budget of {self._budget:g} s is used up")
        began = time.perf_counter()
        try:
            return self._explain(failed)
        finally:
            self.seconds += time.perf_counter() - began

    def _explain(self, failed: FailedStep) -> str | None:
        attempt = failed.outcome.attempt
        step = _capture(failed, keep_optimizer=self._folder is not None)
        broken = _broken_weights(step)
        if broken:
            return self._once("weights", f"not diagnosed: {broken} is not finite before the step: the damage is older")
        need = _TRACE_COST * step.replay().seconds
        if self.seconds + need > self._budget:
            words = f"not diagnosed: recording a step takes about {need:.2g} s, more than the budget has left"
            return self._once("budget", words)
        # An overflow gets here at the smallest scale only: there is no search left that could fix it.
        finding = _find(step, scale=1.0 if failed.outcome.reason == "overflow" else step.scale)
        if finding is None:
            return self._once("nothing", _say_nothing_found(failed))
        self._row_end = attempt
        key = (finding.cause.id, finding.module, finding.file, finding.line)
        if key in self._said:
            return None
        self._said.add(key)
        bundle = self._save(step, attempt, finding)
        self.named.append(NamedFailure(attempt, finding, bundle))
        return _say(finding, bundle)

    def _once(self, reason: str, words: str) -> str | None:
        """Why there is no finding; each reason is given once in a run."""
        if reason in self._said:
            return None
        self._said.add(reason)
        return words

    def _save(self, step: CapturedStep, attempt: int, finding: Finding) -> Path | None:
        if self._folder is None:
            return None
        return step.save(self._folder / f"step-{attempt:08d}", with_data=self._with_data, findings=[finding])


def find_in_step(trace: Trace, *, scale: float) -> Finding | None:
    """The first cause in the trace of a 16-bit step that fails where FP32 does not.

    Args:
        trace: The step, with FP32 twins.
        scale: Its loss scale; gradients that overflow by it alone are left out. 1 leaves out none.
    """
    births = [birth for birth in find_births(trace) if scale == 1.0 or not is_search(birth, scale)]
    harmful = keep_harmful(births, trace)
    wrong = find_wrong_kernels(trace, until=harmful[0].op if harmful else None, ruinous=True)
    if wrong:
        return wrong[0]
    harmful = harmful or find_unfit_constants(trace)
    return _finding(harmful[0]) if harmful else None


def find_in_fp32(trace: Trace) -> Finding | None:
    """The first cause in the FP32 trace of a step that fails in FP32, too."""
    birth = first_birth_in_fp32(trace)
    if birth is None and overflows(trace):
        cause = find_cause("optimization-divergence")
        return Finding(cause, "numbers of the step are too large for FP32", cause.advice, "optimizer")
    if birth is None:
        return None
    finding = _finding(birth)
    if birth.cause != "bad-input-data":
        return finding
    return Finding(finding.cause, finding.seen, finding.fix, "the batch", finding.file, finding.line, "input")


def _find(step: CapturedStep, *, scale: float) -> Finding | None:
    trace = step.replay(trace=True).trace
    if trace is None:
        return None
    # Every number of the trace has its FP32 value beside it: FP32 is replayed only where that is not finite either.
    fails_in_fp32 = any(operand.value.twin_nonfinite for operand in trace.gradients.values())
    found = None if fails_in_fp32 else find_in_step(trace, scale=scale)
    if found is not None:
        return found
    wide = step.replay(precision="fp32", trace=True)
    if wide.finite or wide.trace is None:
        return find_in_step(trace, scale=scale)
    return find_in_fp32(wide.trace)


def _capture(failed: FailedStep, *, keep_optimizer: bool) -> CapturedStep:
    run = failed.run
    return capture_step(
        run.model,
        run.optimizer,
        failed.compute_loss,
        *failed.batches,
        plan=run.plan,
        scale=failed.outcome.scale,
        random_state=failed.random_state,
        buffers=failed.buffers,
        keep_optimizer=keep_optimizer,
        origin=StepOrigin(step=failed.outcome.attempt, islands=run.islands.names),
    )


def _broken_weights(step: CapturedStep) -> str:
    """A weight that is not finite; '' where all are."""
    weights = step.state.captured
    if not weights or bool(torch.stack([w.isfinite().all().to(step.device) for w in weights.values()]).all()):
        return ""
    return next(name for name, weight in weights.items() if not bool(weight.isfinite().all()))


def _finding(birth: Birth) -> Finding:
    cause, op = find_cause(birth.cause), birth.op
    named = op.node if op.phase == "backward" and op.node else op.name
    return Finding(cause, birth.seen, cause.advice, op.module, op.file, op.line, named)


def _say(finding: Finding, bundle: Path | None) -> str:
    place = f"{Path(finding.file).name}:{finding.line}" if finding.file else ""
    where = " in ".join(part for part in (place, finding.module) if part) or "the model"
    kept = f"; bundle {bundle}" if bundle is not None else ""
    return f"{finding.cause.id} at {where}: {finding.seen}{kept}"


def _say_nothing_found(failed: FailedStep) -> str:
    if failed.updates_since:
        return (
            "no cause found: the weights have moved on since the step failed "
            f"({failed.updates_since:,} updates), and it may pass with them"
        )
    return "no cause found: replayed, no operation makes inf or NaN of finite numbers in a way that is known"
