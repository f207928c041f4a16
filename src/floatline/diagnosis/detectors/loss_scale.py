"""Loss-scale verdicts: whether the scale searches, starves, overflows or cannot work. Pure functions from evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from floatline.diagnosis.detectors.operations import base_name
from floatline.diagnosis.evidence import Evidence
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.probe.trace.trace import Trace
from floatline.probe.watch.events import ScalerStepEvent

# A recommended scale keeps the largest gradient this far below the end of FP16: two bits for the steps to come.
MARGIN = 4.0
# A share of lost gradient elements that is worth a word.
STARVES = 0.05

Kind = Literal["search", "forward-overflow", "no-scale", "collapse", "underflow", "overflow"]
_FORWARD = frozenset(
    (
        *("activation-overflow", "product-overflow", "reduction-overflow", "exp-overflow", "scalar-out-of-range"),
        *("input-out-of-range", "eps-underflow", "rounded-onto-singularity", "cancellation"),
    )
)
_FP16 = find_format("fp16")


@dataclass(frozen=True)
class ScaleVerdict:
    """What is to be said about the loss scale of a run.

    Args:
        kind: 'search' is benign. 'underflow' and 'overflow': the present scale is too small or too large, and another
            works. 'no-scale': what keeps some gradients in range loses others. 'forward-overflow': the numbers are
            damaged before the scale comes in. 'collapse': the scale falls without end, for another reason.
        present: The scale of the step that was looked into; 1 where the loss is not scaled.
        recommended: A power of two; None where no scale helps.
        text: The same in one sentence, with the numbers.
    """

    kind: Kind
    present: float
    recommended: float | None
    text: str

    def as_json(self) -> dict[str, Any]:
        """For `--format json`."""
        return {"verdict": self.kind, "present": self.present, "recommended": self.recommended}


@dataclass(frozen=True)
class ScaleOutcome:
    """The gradients of one step at one scale: the share that is 0 only in 16 bits, and whether all are finite."""

    lost: float
    finite: bool


def judge_scale(
    evidence: Evidence, findings: list[Finding], trace: Trace | None, measure: Callable[[float], ScaleOutcome | None]
) -> ScaleVerdict | None:
    """The verdict; None where there is no FP16 gradient to speak of, or nothing to say.

    Args:
        evidence: The runs.
        findings: What was found, the primary cause first.
        trace: The step that was looked into; None where none was recorded.
        measure: Replays that step with the loss multiplied by a factor; None where it cannot.
    """
    primary = findings[0].cause.id if findings else ""
    if not findings:
        return _describe_search(evidence) or (_describe_collapse(evidence, None) if evidence.keeps_skipping else None)
    if primary in _FORWARD and evidence.given.skipped:
        return _describe_forward(evidence, findings[0])
    if primary in ("gradient-underflow", "gradient-overflow") and trace is not None:
        return _choose(evidence, trace, primary, measure)
    if evidence.keeps_skipping:
        return _describe_collapse(evidence, findings[0])
    return None


def present_scale(evidence: Evidence, trace: Trace) -> float:
    """The scale in a recorded step: of a scaler, or the number that the loss was multiplied by last."""
    scaled = evidence.scale_at(int(trace.meta.get("step", evidence.given.step_to_trace)))
    return scaled if scaled != 1.0 else written_scale(trace)


def written_scale(trace: Trace) -> float:
    """The constant that the code itself multiplies the loss by before backward; 1 where there is none."""
    made = [op for op in trace.ops if op.phase == "forward" and op.outputs and base_name(op.name) != "ones_like"]
    if not made or base_name(made[-1].name) != "mul" or made[-1].outputs[0].numel != 1:
        return 1.0
    last = made[-1]
    constants = [abs(scalar) for scalar in last.scalars]
    constants += [o.value.largest for o in last.inputs if o.value.numel == 1 and o.made_by is None and not o.role]
    return next((constant for constant in constants if constant >= 2.0), 1.0)


def largest_gradient(trace: Trace) -> float:
    """The largest FP32 value of anything that the backward pass holds in FP16, with the scale of the step in it."""
    tops = [
        out.twin_largest
        for op in trace.ops
        if op.phase == "backward"
        for out in op.outputs
        if out.dtype == "float16" and out.twin_largest
    ]
    return max(tops, default=0.0)


def best_factor(trace: Trace) -> float:
    """The power of two to multiply the present scale by: the largest that leaves the margin below 65,504."""
    top = largest_gradient(trace)
    if not top:
        return 1.0
    return 2.0 ** math.floor(math.log2(_FP16.max / MARGIN / top))


def span_of(trace: Trace) -> tuple[int, int] | None:
    """Exponents of the smallest gradients that matter and of the largest, in FP32: all but a thousandth lie above."""
    counts = {int(k): n for k, n in trace.meta.get("gradients", {}).get("exponents", {}).items()}
    top = largest_gradient(trace)
    if not counts or not top:
        return None
    least, seen = 0.001 * sum(counts.values()), 0
    for exponent in sorted(counts):
        seen += counts[exponent]
        if seen > least:
            return exponent, max(math.floor(math.log2(top)), max(counts))
    return None


def _choose(
    evidence: Evidence, trace: Trace, cause: str, measure: Callable[[float], ScaleOutcome | None]
) -> ScaleVerdict | None:
    present, factor = present_scale(evidence, trace), best_factor(trace)
    failed = [e.scale for e in evidence.given.of(ScalerStepEvent) if not e.applied]
    if failed and cause == "gradient-underflow":  # what overflowed in another step is no scale to recommend
        factor = min(factor, 2.0 ** math.floor(math.log2(min(failed) / 2 / present)))
    before = float(trace.meta.get("gradients", {}).get("lost", 0.0))
    after = measure(factor)
    if after is None or not largest_gradient(trace):
        return None
    recommended = present * factor
    was = (
        f"was {_share(before)} at {say_scale(present)}"
        if cause == "gradient-underflow"
        else f"{say_scale(present)} overflows"
    )
    outcome = f"at scale {say_scale(recommended)}, {_share(after.lost)} of the gradient elements are lost, {was}"
    if not after.finite:
        outcome = f"at scale {say_scale(recommended)} the step is not finite either"
    if not after.finite or after.lost > max(STARVES, before / 2) or (cause == "gradient-underflow" and factor <= 1.0):
        return ScaleVerdict("no-scale", present, None, f"no loss scale can work: {_range(trace)}; {outcome}")
    kind: Kind = "underflow" if cause == "gradient-underflow" else "overflow"
    return ScaleVerdict(kind, present, recommended, outcome)


def _range(trace: Trace) -> str:
    span = span_of(trace)
    if span is None:
        return "no gradient could be measured"
    low, high = span
    lowest, highest = math.floor(math.log2(_FP16.min_subnormal)), math.floor(math.log2(_FP16.max))
    return (
        f"the step's gradients reach from 2^{low} to 2^{high} with the present scale in them, {high - low + 1} bits; "
        f"FP16 holds 2^{lowest} to 2^{highest}, {highest - lowest + 1} bits"
    )


def _describe_search(evidence: Evidence) -> ScaleVerdict | None:
    skipped, scales = evidence.given.skipped, [e.scale for e in evidence.given.of(ScalerStepEvent)]
    if not skipped or evidence.keeps_skipping:
        return None
    steps = "1 step was" if len(skipped) == 1 else f"{len(skipped)} steps were"
    fell = f"from {say_scale(scales[0])} to {say_scale(scales[-1])}"
    text = f"{steps} skipped while the loss scale went {fell}: a search for the scale, and no fault"
    return ScaleVerdict("search", scales[-1], None, text)


def _fall(evidence: Evidence) -> tuple[float, str]:
    steps = evidence.given.of(ScalerStepEvent)
    scales = [e.scale for e in steps]
    many = f"{len(evidence.given.skipped)} of {len(steps)} steps were skipped"
    return scales[-1], f"the scale went from {say_scale(scales[0])} to {say_scale(scales[-1])}, and {many}"


def _describe_forward(evidence: Evidence, finding: Finding) -> ScaleVerdict:
    last, fell = _fall(evidence)
    place = finding.module or (f"line {finding.line}" if finding.line else "the forward pass")
    text = f"no loss scale can cure it: {place} is not finite before the scale comes in; {fell}"
    return ScaleVerdict("forward-overflow", last, None, text)


def _describe_collapse(evidence: Evidence, finding: Finding | None) -> ScaleVerdict | None:
    if not evidence.given.of(ScalerStepEvent):
        return None
    last, fell = _fall(evidence)
    driver = f"; {finding.cause.id} drives it, not the scale" if finding else ""
    return ScaleVerdict("collapse", last, None, f"the loss scale collapses: {fell}{driver}")


def say_scale(scale: float) -> str:
    """'2^16' for a power of two."""
    mantissa, exponent = math.frexp(scale) if scale > 0 and math.isfinite(scale) else (0.0, 0)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.4g}"


def _share(share: float) -> str:
    if not share:
        return "none"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
