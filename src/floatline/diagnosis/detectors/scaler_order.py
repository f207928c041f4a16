"""Detectors: gradients that are clipped, stepped on, unscaled or penalised with the wrong loss scale in them."""

from __future__ import annotations

import math
from itertools import pairwise

from floatline.causes import find_cause
from floatline.diagnosis.evidence import is_diverging
from floatline.findings import Finding
from floatline.probe.runs.records import OptimizerRecord, RunRecord
from floatline.probe.watch.events import (
    AutogradEvent,
    BackwardEvent,
    ClearEvent,
    ClipEvent,
    GradEvent,
    LoopEvent,
    NewScalerEvent,
    NormEvent,
    OptimizerEvent,
    ScalerStepEvent,
    ScaleUpdateEvent,
    StepEvent,
    TouchEvent,
    UnscaleEvent,
)


def find_scaler_misuse(given: RunRecord) -> list[Finding]:
    """Unscaling twice or too early, and steps that the scaler does not see."""
    return (_find_wrong_unscale(given) or _find_early_unscale(given) or _find_direct_step(given))[:1]


def _find_wrong_unscale(given: RunRecord) -> list[Finding]:
    """Gradients divided by the scale that did not have it in them."""
    wrong = [e for e in given.of(UnscaleEvent) if any(factor < 0.67 for factor in e.after)]
    if not wrong:
        return []
    first, scale = wrong[0], wrong[0].scale
    since = _since_clearing(given, first)
    share = min(first.after)
    many = f"in {len(wrong)} of {len(given.of(UnscaleEvent))} calls"
    earlier = [e for e in since if isinstance(e, UnscaleEvent)]
    if earlier:
        num = len(first.after)
        return [
            _finding(
                given,
                "scaler-misuse",
                first,
                op="torch.amp.GradScaler.unscale_",
                seen=f"unscale_ divided gradients that it had divided before, {many}: of {num} backward passes summed "
                f"up, the earliest was left multiplied by {share:.3g}",
                fix="Call unscale_ once a step, after the last micro-batch.",
            )
        ]
    touches = [e for e in since if isinstance(e, TouchEvent)]
    if touches:
        return [
            _finding(
                given,
                "scaler-misuse",
                touches[-1],
                op=touches[-1].call,
                seen=f"gradients were divided by the scale {scale:g} by hand, and again by the scaler, {many}",
                fix="Leave out the division by hand: the scaler divides.",
            )
        ]
    unscaled = [e for e in since if isinstance(e, BackwardEvent) and e.factor == 1.0]
    return [
        _finding(
            given,
            "scaler-misuse",
            unscaled[-1] if unscaled else first,
            op="backward",
            seen=f"the scaler divided gradients by {scale:g}, {many}, but backward ran on a loss that was not scaled: "
            f"the gradients were left multiplied by {share:.3g}",
            fix="Run backward on what the scaler's scale() returns for this loss.",
        )
    ]


def _find_early_unscale(given: RunRecord) -> list[Finding]:
    """A backward pass after unscale_: its gradients reach the step with the scale in them."""
    wrong = [
        e for e in given.of(StepEvent) if e.through_scaler and not e.scales_itself and any(f > 1.5 for f in e.factors)
    ]
    if not wrong:
        return []
    early = [e for e in _since_clearing(given, wrong[0]) if isinstance(e, UnscaleEvent)]
    return [
        _finding(
            given,
            "scaler-misuse",
            early[0] if early else wrong[0],
            op="torch.amp.GradScaler.unscale_",
            seen=f"{len(wrong)} steps used gradients of which a part was still multiplied by "
            f"{max(wrong[0].factors):g}: backward ran again after unscale_",
            fix="Call unscale_ once a step, after the last backward pass.",
        )
    ]


def _find_direct_step(given: RunRecord) -> list[Finding]:
    """optimizer.step() on scaled gradients."""
    wrong = [e for e in given.of(StepEvent) if not e.through_scaler and _is_still_scaled(e)]
    if not wrong:
        return []
    scale = max(wrong[0].factors)
    by_hand = next((made for made in given.optimizers if made.by_hand), None)
    if by_hand is not None and wrong[0].optimizer == by_hand.number:
        return _find_scaled_update(given, by_hand, scale, len(wrong))
    return [
        _finding(
            given,
            "scaler-misuse",
            wrong[0],
            op=f"{wrong[0].name}.step",
            seen=f"{len(wrong)} calls of optimizer.step() used gradients that were still multiplied by {scale:g}: "
            f"the learning rate was {scale:g} times what it says",
            fix="Let the scaler make this step, and update it afterwards."
            if given.of(NewScalerEvent)
            else f"Divide the gradients by the loss scale, {scale:g}, before this step.",
        )
    ]


def find_steps_past_overflow(given: RunRecord) -> list[Finding]:
    """optimizer.step() on gradients that unscale_ had found not to be finite: the scaler would have left it out."""
    steps = [e for e in given.of(StepEvent) if not (e.through_scaler or e.scales_itself)]
    wrong = [e for e in steps if not all(map(math.isfinite, e.largest))]
    updates = given.of(ScaleUpdateEvent)  # a scale falls where unscale_ found inf, which is not noted in each step
    told = {e.step for before, e in pairwise(updates) if e.scaler == before.scaler and e.after < before.after}
    told |= {e.step for e in wrong if any(isinstance(one, UnscaleEvent) for one in _since_clearing(given, e))}
    first = next((e for e in wrong if e.step in told), None)
    if first is None:
        return []
    return [
        _finding(
            given,
            "scaler-misuse",
            first,
            op=f"{first.name}.step",
            seen="optimizer.step() used gradients that had overflowed by the loss scale, first in step "
            f"{first.step:,}: unscale_ had found that, and step() of the scaler would have left the step out",
            fix="Let the scaler make this step.",
        )
    ]


def _find_scaled_update(given: RunRecord, made: OptimizerRecord, scale: float, num: int) -> list[Finding]:
    """An update by hand with the loss scale in it. A factor of the loss that does no harm may be meant."""
    if given.first_bad_step is None and not is_diverging(given.losses):
        return []
    seen = f"{num} updates by hand moved the weights by gradients that were still multiplied by {scale:g}"
    fix = f"Divide the gradients by the loss scale, {scale:g}, before they move the weights."
    return [Finding(find_cause("scaler-misuse"), seen, fix, given.entry, made.file, made.line, made.call)]


def _is_still_scaled(step: StepEvent) -> bool:
    largest = max(step.factors, default=1.0)
    # The code may have divided and clipped by hand at once: then the gradients shrank by more than the scale.
    return largest > 1.5 and step.shrunk * largest > 2.0


def find_clip_before_unscale(given: RunRecord, fp32: RunRecord | None) -> list[Finding]:
    """Clipping, or a norm that decides something, while the gradients are still scaled."""
    clips = [e for e in given.of(ClipEvent) if e.factor > 1.5 and _clips_wrongly(e)]
    if clips:
        first = clips[0]
        norm, factor, limit = first.norm, first.factor, first.limit
        return [
            _finding(
                given,
                "clip-before-unscale",
                first,
                op="torch.nn.utils.clip_grad_norm_",
                seen=f"clipped to {limit:g} at norm {norm:.4g}, with the loss scale {factor:g} still in it, in "
                f"{len(clips)} steps: the true norm was {norm / factor:.3g}, and {limit / factor:.3g} was left",
                fix=find_cause("clip-before-unscale").advice,
            )
        ]
    return _find_hand_made_clip(given) or _find_norm(given, fp32)


def _clips_wrongly(clip: ClipEvent) -> bool:
    norm, factor, limit = clip.norm, clip.factor, clip.limit
    if not norm > limit or not math.isfinite(norm):
        return False
    # A limit that was multiplied by the scale as well is right; it is then of the scale's own size.
    return not (factor >= 1024 and limit >= 0.01 * factor)


def _find_hand_made_clip(given: RunRecord) -> list[Finding]:
    wrong = [e for e in given.of(UnscaleEvent) if e.shrunk < 0.98 and any(f > 1.5 for f in e.before)]
    if not wrong:
        return []
    touches = [e for e in _since_clearing(given, wrong[0]) if isinstance(e, TouchEvent)]
    place = touches[-1] if touches else wrong[0]
    call = touches[-1].call if touches else ""
    by_value = call in ("torch._foreach_clamp_min_", "torch._foreach_clamp_max_")
    return [
        _finding(
            given,
            "clip-before-unscale",
            place,
            op="torch.nn.utils.clip_grad_value_" if by_value else call,
            seen=f"gradients were multiplied by {wrong[0].shrunk:.3g} while the loss scale "
            f"{max(wrong[0].before):g} was in them, and then unscaled, in {len(wrong)} steps",
            fix=find_cause("clip-before-unscale").advice,
        )
    ]


def _find_norm(given: RunRecord, fp32: RunRecord | None) -> list[Finding]:
    """A norm that is only logged does no harm; one that the run then goes wrong by does."""
    reads = [e for e in given.of(NormEvent) if e.factor > 1.5]
    if not reads or fp32 is None or given.progress(fp32) > 0.8:
        return []
    tried = {e.step for e in given.of(StepEvent, ScalerStepEvent)}
    left_out = {e.step for e in reads} - tried
    if len(left_out) < max(2, 0.1 * len({e.step for e in reads})):
        return []
    first = reads[0]
    return [
        _finding(
            given,
            "clip-before-unscale",
            first,
            op=first.call,
            seen=f"the norm of gradients with the loss scale {first.factor:g} in them was read, and "
            f"{len(left_out)} of {given.num_steps} steps were left out by the loop",
            fix="Call unscale_ of the scaler before this norm is read.",
        )
    ]


def find_scaled_penalty(given: RunRecord) -> list[Finding]:
    """A loss made of gradients of a scaled output that nothing divided by the scale."""
    wrong = [e for e in given.of(BackwardEvent) if e.penalty > 1.5]
    sources = [e for e in given.of(AutogradEvent) if e.create_graph and e.factor > 1.5]
    if not wrong or not sources:
        return []
    return [
        _finding(
            given,
            "scaled-grad-in-penalty",
            sources[0],
            op="torch.autograd.grad" if isinstance(sources[0], GradEvent) else "backward",
            seen=f"gradients of an output multiplied by the loss scale {wrong[0].penalty:g} went into the loss "
            f"of {len(wrong)} steps without being divided by it; that loss was {wrong[0].loss:.4g} at first",
            fix=find_cause("scaled-grad-in-penalty").advice,
        )
    ]


def _since_clearing(given: RunRecord, last: OptimizerEvent) -> list[LoopEvent]:
    """Events before `last`, since its optimizer's gradients were cleared or used."""
    found: list[LoopEvent] = []
    for event in reversed(given.events[: given.events.index(last)]):
        mine = isinstance(event, OptimizerEvent) and event.optimizer == last.optimizer
        if isinstance(event, StepEvent) and mine:
            break
        if isinstance(event, ClearEvent) and event.owner == last.optimizer:
            break
        if mine or isinstance(event, BackwardEvent):
            found.append(event)
    return found[::-1]


def _finding(given: RunRecord, cause: str, event: LoopEvent, *, op: str, seen: str, fix: str) -> Finding:
    return Finding(find_cause(cause), seen, fix, given.entry, event.file, event.line, op)
