"""What other formats do, and what a verdict about the loss scale means for the fix."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from floatline.diagnosis.detectors.loss_scale import ScaleVerdict
from floatline.diagnosis.evidence import Evidence
from floatline.diagnosis.trials.counterfactual import describe_run
from floatline.errors import TargetError
from floatline.findings import Finding
from floatline.probe.runs.runs import run_target

_NUMERIC = frozenset(["range", "rounding"])
# A whole run is replayed in BF16 where it has no more steps.
_MOST_STEPS = 400


def try_formats(evidence: Evidence, findings: list[Finding], *, may_run: bool) -> tuple[str, ...]:
    """The run in BF16, where range or rounding is to blame and the run is short, and in FP32: one sentence each."""
    if not findings or evidence.given.exception is not None:
        return ()
    tried: list[str] = []
    given = evidence.given
    if may_run and findings[0].cause.family in _NUMERIC and evidence.fails and given.num_steps <= _MOST_STEPS:
        evidence.on_progress("trying BF16")
        try:
            steps = given.num_steps if given.kind == "build" else evidence.steps
            bf16 = run_target(evidence.target, steps=steps, seed=evidence.seed, precision="bf16")
            tried.append(f"in BF16: {describe_run(bf16)}")
        except TargetError:
            pass
    return (*tried, f"in FP32, same seed and batches: {describe_run(evidence.fp32)}")


def apply_scale(findings: list[Finding], scale: ScaleVerdict | None, evidence: Evidence) -> list[Finding]:
    """The findings, with the recommended scale in the fix of the first."""
    if scale is None or scale.recommended is None or not findings:
        return findings
    power = f"2.0**{round(math.log2(scale.recommended))}"
    model = evidence.given.model
    halves = model is not None and any(p.dtype == torch.float16 for p in model.parameters())
    fix = f"scaler = torch.amp.GradScaler(init_scale={power}); scaler.scale(loss).backward()"
    if halves:
        fix = f"(loss.float() * {power}).backward()  # then divide the gradients by it in FP32"
    return [replace(findings[0], fix=fix), *findings[1:]]
