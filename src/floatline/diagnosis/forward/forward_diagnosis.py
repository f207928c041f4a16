"""diagnose_captured: whether a forward pass may run in 16 bits, what breaks it there, and the smallest FP32 island."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from floatline.diagnosis.detectors.operations import FORMATS
from floatline.diagnosis.forward.evidence import (
    ForwardArm,
    ForwardEvidence,
    make_evidence,
    other_format,
    run_arm,
    settle_formats,
    settle_marks,
)
from floatline.diagnosis.forward.findings import (
    find_by_island,
    find_lost_weights,
    find_loud,
    find_silent,
    find_worse_modules,
)
from floatline.diagnosis.forward.result import ForwardDiagnosis, OutputRow, say_percent
from floatline.diagnosis.islands.errors import OUTPUTS, Tolerance, moved_weights
from floatline.diagnosis.islands.island import Island
from floatline.diagnosis.islands.judge import IslandJudge
from floatline.diagnosis.islands.log import SearchLog
from floatline.diagnosis.islands.search import find_island
from floatline.errors import TargetError
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.probe.steps.captured_forward import CapturedForward
from floatline.probe.trace.trace import Trace

# Seconds that the search for an island may take.
BUDGET = 120.0
# From this share of a format's range on, the largest number is worth a word.
_NEAR = 0.25
# So many times nearer to FP32 one format must be than the other to be called so.
_NEARER = 1.2


def diagnose_captured(
    step: CapturedForward,
    text: str,
    *,
    searches: bool = True,
    on_progress: Callable[[str], None] | None = None,
    trace_path: str | None = None,
) -> ForwardDiagnosis:
    """Say of a forward pass whether it may run in 16 bits, and what breaks it.

    Args:
        step: The pass.
        text: What the user calls it.
        searches: Whether the smallest FP32 island is looked for.
        on_progress: Told what is done next.
        trace_path: Where to keep the trace of the pass.

    Raises:
        TargetError: FP32 fails with an exception, or gives no tensor.
    """
    began, say = time.perf_counter(), on_progress or _say_nothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the target's own: they are not what was asked for
        say("running it in FP32 and in 16 bits")
        settle_formats(step)
        settle_marks(step)
        given, fp32 = run_arm(step), run_arm(step, "fp32")
        if fp32.replay is None:
            raise TargetError(
                f"Target '{text}' raises {fp32.failure} in FP32, too. Run it alone to see the whole error."
            )
        if not fp32.replay.raw:
            raise TargetError(f"Target '{text}' gives no tensor. Return one, or a row, mapping or dataclass with some.")
        evidence = make_evidence(step, given, fp32, text)
        evidence.on_progress = say
        other = run_arm(step, other_format(step))
        found = _explain(evidence, given, _choose_tolerance(step, other, fp32), searches=searches)
        trace = evidence.trace(0)
        if trace_path is not None and trace is not None:
            trace.save(trace_path)
        beside = _compare(step, other, fp32, other_format(step))
        rows = (_compare(step, given, fp32), beside, _measure_floor(step, fp32))
        notes = (*_say_nearer(rows, evidence), *_say_headroom(step, trace))
    tried = (found.tried,) if found.tried else ()
    return ForwardDiagnosis(
        text,
        step.plan.name,
        tuple(found.findings),
        time.perf_counter() - began,
        tried=tried if found.findings else (),
        notes=notes if found.findings else (*notes, *tried),
        unexplained=found.unexplained,
        fails_in_fp32=evidence.fails_in_fp32,
        outputs=rows,
        island=found.island,
    )


@dataclass(frozen=True)
class _Explained:
    """What a pass suffers from; what was tried, and what is left without a finding, in words; and its island."""

    findings: list[Finding]
    tried: str
    unexplained: str
    island: Island | None


def _explain(evidence: ForwardEvidence, given: ForwardArm, tolerance: Tolerance, *, searches: bool) -> _Explained:
    step = cast("CapturedForward", evidence.forward)
    judge = IslandJudge([step], tolerance=tolerance, log=SearchLog(None), budget=math.inf, on_replay=lambda: None)
    findings, tried, island = find_loud(evidence), "", None
    fails = given.replay is None or not given.replay.finite
    apart = not fails and not judge.outcome(0).passes
    if apart:
        evidence.on_progress("trying suspected lines in FP32")
        findings, tried = find_silent(evidence, judge)
    if searches and (apart or fails) and not evidence.fails_in_fp32:
        island = find_island([step], tolerance=tolerance, budget=BUDGET, on_progress=evidence.on_progress)
        findings = findings or (find_by_island(evidence, island) if apart else [])
        findings += [] if apart or island.members or island.lines else find_lost_weights(evidence)
    left = given.failure or judge.outcome(0).why if (fails or apart) and not findings else ""
    return _Explained(findings, tried, left, island)


def _say_nothing(_text: str) -> None:
    pass


def _choose_tolerance(step: CapturedForward, other: ForwardArm, fp32: ForwardArm) -> Tolerance:
    """How near to FP32: FP16 may not be farther than BF16, which rounds 8 times coarser and never overflows."""
    row = _compare(step, other, fp32)
    if step.plan.compute != "fp16" or row.worst is None:
        return OUTPUTS
    return replace(OUTPUTS, most=max(OUTPUTS.whole, row.worst.distance))


def _compare(step: CapturedForward, arm: ForwardArm, fp32: ForwardArm, name: str = "") -> OutputRow:
    if arm.replay is None or fp32.replay is None:
        return OutputRow(name or step.plan.compute, (), arm.failure)
    return OutputRow(name or step.plan.compute, tuple(step.match(arm.replay, fp32.replay).values()))


def _measure_floor(step: CapturedForward, fp32: ForwardArm) -> OutputRow:
    with moved_weights(step):
        moved = run_arm(step, "fp32")
    return _compare(step, moved, fp32, "floor")


def _say_nearer(rows: tuple[OutputRow, ...], evidence: ForwardEvidence) -> tuple[str, ...]:
    """Which of the two formats is nearer to FP32, how many times, and where it is not."""
    own, other = rows[0], rows[1]
    if own.worst is None or other.worst is None:
        return ()
    a, b = own.worst.distance, other.worst.distance
    if not math.isfinite(a) or not math.isfinite(b):
        return tuple(
            f"{good.arm.upper()} is {say_percent(good.worst.distance)} off FP32, and {bad.arm.upper()} is not finite"
            for good, bad in ((own, other), (other, own))
            if good.worst is not None
            and math.isfinite(good.worst.distance)
            and bad.worst is not None
            and not math.isfinite(bad.worst.distance)
        )
    near, far = (own, other) if a <= b else (other, own)
    times = max(a, b) / max(min(a, b), 1e-12)
    if times < _NEARER or not max(a, b):
        return (f"{own.arm.upper()} and {other.arm.upper()} are about as far from FP32 here",)
    text = f"{near.arm.upper()} is {times:.2g} times nearer to FP32 than {far.arm.upper()} here"
    narrow = {own.arm: evidence.trace(0), other.arm: evidence.trace(0, cast(Any, other.arm))}
    ours, theirs = narrow[near.arm], narrow[far.arm]
    worse = [] if ours is None or theirs is None else find_worse_modules(ours, theirs)
    return (f"{text}, except in {', '.join(worse[:3])}" if worse else text,)


def _say_headroom(step: CapturedForward, trace: Trace | None) -> tuple[str, ...]:
    """The largest number of the pass, where it comes near to the end of the format."""
    if trace is None or step.plan.compute != "fp16":
        return ()
    end = find_format("fp16").max
    narrow = [(out.largest, op) for op in trace.ops for out in op.outputs if out.dtype in FORMATS and not out.nonfinite]
    top, op = max(narrow, key=lambda pair: pair[0], default=(0.0, None))
    if op is None or top < _NEAR * end:
        return ()
    return (
        f"the largest number that stays finite is {top:,.0f} of {end:,.0f}, in {op.module or 'the model'}, {op.name}",
    )
