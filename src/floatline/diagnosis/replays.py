"""What a fix would do, tried by replay: the run in FP32, in BF16, and with the blamed module alone in FP32."""

from __future__ import annotations

import math

from floatline.diagnosis.evidence import Evidence
from floatline.errors import GuardError, TargetError
from floatline.findings import Finding
from floatline.probe.records import RunRecord
from floatline.probe.runs import run_target

_NUMERIC = frozenset(["range", "rounding"])


def try_fixes(evidence: Evidence, findings: list[Finding]) -> tuple[str, ...]:
    """One sentence for each replay, with its numbers."""
    if not findings or evidence.given.exception is not None:
        return ()
    tried: list[str] = []
    if findings[0].cause.family in _NUMERIC and evidence.fails:
        tried += _try_island(evidence, findings[0])
        evidence.on_progress("trying BF16")
        try:
            steps = len(evidence.given.losses) if evidence.given.kind == "build" else None
            bf16 = run_target(evidence.target, steps=steps, seed=evidence.seed, precision="bf16")
            tried.append(f"in BF16: {_describe(bf16)}")
        except TargetError:
            pass
    return (*tried, f"in FP32, same seed and batches: {_describe(evidence.fp32)}")


def _describe(record: RunRecord) -> str:
    if record.exception is not None:
        return f"{record.exception.kind} at step {record.exception.step}"
    losses = record.losses
    text = f"the loss goes from {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} steps"
    if record.first_bad_step is not None:
        return f"{text}, and something is not finite from step {record.first_bad_step} on"
    return text if all(map(math.isfinite, losses)) else f"{text}, not always finite"


def _try_island(evidence: Evidence, finding: Finding) -> list[str]:
    """The run once more, with the module of the finding in FP32."""
    given = evidence.given
    if not finding.module or given.kind != "build":
        return []
    evidence.on_progress(f"trying {finding.module} in FP32")
    try:
        record = run_target(evidence.target, steps=len(given.losses), seed=evidence.seed, islands=(finding.module,))
    except (TargetError, GuardError):
        return []  # the finding names a parameter, or a part of the loop
    skips = f", {len(record.skipped)} steps skipped ({len(given.skipped)} without)" if given.skipped else ""
    return [f"with {finding.module} alone in FP32: {_describe(record)}{skips}"]
