"""Runs that never learn, in FP32 neither: a clamp that kills the gradient, or data with nothing to learn."""

from __future__ import annotations

import math
import statistics

import torch

from floatline.base.texts import percent
from floatline.causes import find_cause
from floatline.diagnosis.detectors.operations import base_name
from floatline.diagnosis.evidence import Evidence
from floatline.findings import Finding
from floatline.probe.runs.runs import run_target
from floatline.probe.steps.other_precision import as_fp32
from floatline.probe.trace.trace import Op, Trace

# Weights that went this far, against their size, have been trained.
FAR = 0.05
LONGER = 4
_CLAMPS = frozenset(["clamp", "clamp_min", "clamp_max", "hardtanh", "minimum", "maximum", "relu6"])


def find_what_never_learns(evidence: Evidence) -> list[Finding]:
    """What keeps the loss where it is in both precisions; nothing where it falls, or is as low as it gets."""
    losses = evidence.fp32.losses
    if len(losses) < 10 or not all(map(math.isfinite, losses)) or not any(losses[len(losses) // 2 :]):
        return []
    step = evidence.fp32.loss_steps[len(losses) // 2]
    trace = None if _falls(losses) else evidence.trace(step, "fp32")
    clamp = None if trace is None else _killing_clamp(trace)
    if clamp is not None:
        cause = find_cause("clamp-kills-gradient")
        seen = f"every gradient is exactly 0, in FP32 too: the loss stands at the bound of {base_name(clamp.name)}"
        fix = cause.advice
        return [Finding(cause, seen, fix, clamp.module, clamp.file, clamp.line, clamp.name)]
    trace = evidence.trace(step)  # it was looked at before: a loss that falls to that of guessing costs nothing more
    return [] if trace is None else _nothing_to_learn(evidence, trace)


def _nothing_to_learn(evidence: Evidence, trace: Trace) -> list[Finding]:
    """The weights have moved far, and the loss is still that of guessing: wrong labels have no other tell.

    A run that has yet to leave its plateau looks the same. So half of the batches are learned, and the others are
    guessed by what was learned; with too few of them, the target is run on for LONGER times its steps.
    """
    classes = _num_classes(trace)
    if classes < 2 or not _is_guessing(evidence.fp32.losses, classes, 0.05) or _motion(evidence) < FAR:
        return []
    evidence.on_progress("seeing whether the labels follow from the inputs")
    tried = _learn_half(evidence)
    if tried is None:
        losses = run_target(
            evidence.target, steps=LONGER * len(evidence.fp32.losses), seed=evidence.seed, precision="fp32"
        ).losses
        tried = _last(losses)
    if tried < 0.95 * math.log(classes):
        return []
    losses = evidence.fp32.losses
    last = _last(losses)
    cause = find_cause("bad-input-data")
    seen = f"after {len(losses)} steps in FP32, which moved the weights by {percent(_motion(evidence))}, the loss is "
    seen += f"{last:.4g}: that of guessing among {classes} classes is {math.log(classes):.4g}"
    return [Finding(cause, seen, cause.advice, "batches[*].targets[0]", op="input")]


def _is_guessing(losses: list[float], classes: int, share: float) -> bool:
    """Whether the last losses are those of guessing: above by a share at most, and not below, which takes knowledge."""
    return 0.985 * math.log(classes) <= _last(losses) <= (1 + share) * math.log(classes)


def _num_classes(trace: Trace) -> int:
    """Classes of a cross-entropy; 2 of a binary one; 0 where there is none."""
    if any(base_name(op.name) in ("binary_cross_entropy", "binary_cross_entropy_with_logits") for op in trace.ops):
        return 2
    names = ("nll_loss_forward", "nll_loss2d_forward")
    shapes = [op.inputs[0].value.shape for op in trace.ops if base_name(op.name) in names and op.inputs]
    return shapes[-1][1] if shapes and len(shapes[-1]) > 1 else 0


def _motion(evidence: Evidence) -> float:
    """How far the weights went from where they began, against their size; 0 where it is not known."""
    if evidence.target.builder is None or evidence.fp32.model is None:
        return 0.0
    begun = dict(evidence.target.build(evidence.seed).model.named_parameters())
    pairs = [(begun[name].detach().float(), p.detach().float()) for name, p in evidence.fp32.model.named_parameters()]
    moved = sum(float((new - old).square().sum()) for old, new in pairs)
    return math.sqrt(moved / max(sum(float(old.square().sum()) for old, _ in pairs), 1e-30))


def _learn_half(evidence: Evidence) -> float | None:
    """The lowest loss of batches that were not trained on, in FP32 with Adam; None with fewer than four batches."""
    with as_fp32(), torch.random.fork_rng(devices=[]):
        workload = evidence.target.build(evidence.seed)
        if len(workload.batches) < 4:
            return None
        seen, unseen = workload.batches[::2], workload.batches[1::2]
        trained = [p for p in workload.model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, 1e-2)
        lowest = math.inf
        for step in range(120):
            workload.model.train()
            optimizer.zero_grad()
            workload.compute_loss(*seen[step % len(seen)]).backward()
            optimizer.step()
            if step % 20 == 19:
                workload.model.eval()
                with torch.no_grad():
                    lowest = min(lowest, _mean([float(workload.compute_loss(*batch)) for batch in unseen]))
    return lowest


def _last(losses: list[float]) -> float:
    return _mean(losses[-max(1, len(losses) // 5) :])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _falls(losses: list[float]) -> bool:
    """Whether the loss fell at all, by the means of the first and last fifth."""
    size = max(1, len(losses) // 5)
    first, last = _mean(losses[:size]), _mean(losses[-size:])
    late = losses[len(losses) // 2 :]
    noise = statistics.pstdev(late)
    return last < first - max(0.02 * abs(first), noise)


def _killing_clamp(trace: Trace) -> Op | None:
    """The clamp behind which every gradient is zero."""
    gradients = [operand.value for operand in trace.gradients.values()]
    if not gradients or any(value.zeros < value.numel for value in gradients):
        return None
    clamps = [op for op in trace.ops if op.phase == "forward" and base_name(op.name) in _CLAMPS and op.outputs]
    return next((op for op in reversed(clamps) if _is_saturated(op)), clamps[-1] if clamps else None)


def _is_saturated(op: Op) -> bool:
    """Whether nothing but the bounds comes out."""
    out = op.outputs[0]
    bounds = {abs(scalar) for scalar in op.scalars} | {operand.value.largest for operand in op.inputs[1:]}
    ends = [size for size in (out.smallest, out.largest) if 0 < size < math.inf]
    return all(any(math.isclose(size, bound, rel_tol=1e-3) for bound in bounds) for size in ends) and (
        0.0 in bounds or not out.zeros
    )
