"""diagnose: run a target as it is and in FP32, look into the step that fails, and name the cause."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

from floatline.diagnosis.evidence import Evidence
from floatline.diagnosis.exceptions import find_exceptions
from floatline.diagnosis.learning import find_what_never_learns
from floatline.diagnosis.loop import find_loop_faults
from floatline.diagnosis.numbers import find_failures, find_silent_damage
from floatline.diagnosis.replays import try_fixes
from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding
from floatline.probe.runs import run_target
from floatline.workload import load_target


def diagnose(
    target: str,
    *,
    steps: int | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
    trace_path: str | None = None,
) -> Diagnosis:
    """Name what a target's training suffers from, or say that nothing is wrong.

    The order: exceptions and calls of the loop; then, where something is not finite, whether FP32 fails too, and the
    operation at which inf or NaN begins; then damage that shows in no number but FP32's.

    Args:
        target: FILE.py, package.module, or either with :name.
        steps: Steps to run; None is 40 for a build() target, and train()'s own number.
        seed: Seed of every run.
        on_progress: Told what is done next.
        trace_path: Where to keep the trace of the step that was looked into.
    """
    began = time.perf_counter()
    say: Callable[[str], None] = on_progress or _say_nothing
    loaded = load_target(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the target's own: they are not what was asked for
        say("running the target as it is")
        given = run_target(loaded, steps=steps, seed=seed)
        stuck = [finding for finding in find_exceptions(given, None) if finding.cause.id == "distributed-desync"]
        if stuck:  # in FP32 the processes would wait for each other just as long
            return Diagnosis(target, given.precision, tuple(stuck), time.perf_counter() - began)
        say("running it in FP32")
        fp32 = run_target(loaded, steps=steps, seed=seed, precision="fp32")
        evidence = Evidence(loaded, seed, given, fp32, say)
        findings = _find(evidence)
        tried = try_fixes(evidence, findings)
        if trace_path is not None:
            known = [trace for trace in evidence.traces.values() if trace is not None]
            trace = known[0] if known else evidence.trace(given.step_to_trace)
            if trace is not None:
                trace.save(trace_path)
    return Diagnosis(target, given.precision, tuple(findings), time.perf_counter() - began, tried)


def _say_nothing(_text: str) -> None:
    pass


def _find(evidence: Evidence) -> list[Finding]:
    for family in (
        lambda: find_exceptions(evidence.given, evidence.fp32),
        lambda: find_loop_faults(evidence.given, evidence.fp32),
        lambda: find_failures(evidence),
        lambda: find_silent_damage(evidence),
        lambda: find_what_never_learns(evidence),
    ):
        found = family()
        if found:
            return found
    return []
