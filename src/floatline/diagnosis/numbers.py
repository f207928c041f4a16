"""From traces to findings: range and rounding in a failing step, silent damage in one that does not fail."""

from __future__ import annotations

from dataclasses import replace

from floatline.causes import find_cause
from floatline.diagnosis import silent
from floatline.diagnosis.births import (
    Birth,
    damages_loss,
    describe_birth,
    find_births,
    find_unfit_constants,
    is_harmful,
    is_search,
    keep_harmful,
)
from floatline.diagnosis.evidence import Evidence
from floatline.diagnosis.indices import describe_collision
from floatline.diagnosis.not_precision import first_birth_in_fp32, is_diverging, overflows, runs_away
from floatline.findings import Finding
from floatline.probe.trace import Op, Trace

# A layer that stands still must be this far from FP32's: less is what a converged model does.
MOVES = 0.01
# Updates that are lost show in a slow run, too: a share of the loss that is above what rounding does to it.
SLOWLY = 0.002

# Share of second moments that are 0: above it Adam no longer divides by what it has seen.
DEAD = 0.5

# Seconds from which on a run is not repeated lightly.
SLOW = 3.0
# A step that is soon reached, and by which averages and counters have begun.
EARLY = 8


def find_failures(evidence: Evidence) -> list[Finding]:
    """Why loss, gradients or weights are not finite, or the loss grows without end."""
    if _grows_in_fp32(evidence):
        return [_divergence(evidence)]
    if not evidence.fails:
        return []
    if not evidence.fails_in_fp32:
        return _fails_in_16_bits(evidence)
    bad = evidence.fp32.first_bad_step
    failed = evidence.given.step_to_trace
    # FP32 passes the step at which 16 bits fail: what it fails of later is another matter, unless the weights had
    # begun to diverge by then.
    if bad is not None and failed < bad and (failed == 0 or not is_diverging(evidence.fp32.losses)):
        return _fails_in_16_bits(evidence) or _fails_everywhere(evidence)
    return _fails_everywhere(evidence) or _fails_in_16_bits(evidence)


def _grows_in_fp32(evidence: Evidence) -> bool:
    """Whether FP32 diverges without an inf yet, and had begun to where 16 bits fail."""
    steps = evidence.fp32.loss_steps
    until = None
    if evidence.fails:
        until = sum(step <= evidence.given.step_to_trace for step in steps) - 1
    return runs_away(evidence.fp32.losses, until=until)


def _fails_in_16_bits(evidence: Evidence) -> list[Finding]:
    trace = evidence.trace(evidence.given.step_to_trace)
    if trace is None:
        return []
    evidence.found_in = trace
    dead = _dead_moments(evidence)
    if dead > DEAD:
        return [_dead_state(evidence, dead)]
    scale = evidence.scale_at(evidence.given.step_to_trace)
    # A loop that leaves out every step at one and the same scale of its own searches for none.
    searches = len({event.data["scale"] for event in evidence.given.of("scaler-step")}) > 1
    births = [b for b in find_births(trace) if scale == 1.0 or not searches or not is_search(b, scale)]
    harmful = keep_harmful(births, trace)
    if harmful:
        return [_place_in_loop(describe_birth(birth), birth, evidence) for birth in _distinct(harmful)]
    updates = find_births(trace, phases=("update",))
    if updates:
        return [_state_underflow(evidence, updates)]
    return [describe_birth(birth) for birth in _distinct(find_unfit_constants(trace))]


def _distinct(births: list[Birth]) -> list[Birth]:
    """The first birth, and others of another place or cause; what a birth leads to is not told apart here."""
    seen: dict[tuple[str, str, int], Birth] = {}
    for birth in births:
        seen.setdefault((birth.cause, birth.op.file, birth.op.line), birth)
    return list(seen.values())[:3]


def _place_in_loop(finding: Finding, birth: Birth, evidence: Evidence) -> Finding:
    """A loss that the user's loop multiplied by itself overflows where it goes backward: that line is to blame."""
    calls = [event for event in evidence.given.of("backward") if event.file]
    by_hand = evidence.given.kind == "train" and not evidence.given.of("scaler-new") and calls
    if birth.cause != "gradient-overflow" or not by_hand:
        return finding
    return replace(finding, module="", file=calls[0].file, line=calls[0].line, op="backward")


def _fails_everywhere(evidence: Evidence) -> list[Finding]:
    step = evidence.fp32.first_bad_step
    trace = None if step is None else evidence.trace(step, "fp32")
    birth = None if trace is None else first_birth_in_fp32(trace)
    if birth is not None and birth.cause == "bad-input-data" and evidence.fp32.bad_tensors:
        bad = evidence.fp32.bad_tensors[0]
        return [describe_birth(birth, module=bad.name, op="input")]
    if birth is not None:
        return [describe_birth(birth)]
    if is_diverging(evidence.fp32.losses) or (step and trace is not None and overflows(trace)):
        return [_divergence(evidence)]
    return []


def _divergence(evidence: Evidence) -> Finding:
    cause = find_cause("optimization-divergence")
    losses = evidence.fp32.losses
    made = next(iter(evidence.given.optimizers), None)
    return Finding(
        cause,
        seen=f"in FP32 the loss goes from {losses[0]:.4g} to {max(map(abs, losses)):.4g} in {len(losses)} steps",
        fix=next(iter(cause.remedies), ""),
        module="optimizer",
        file=made.file if made else "",
        line=made.line if made else 0,
        op=made.call if made else "",
    )


def _state_underflow(evidence: Evidence, updates: list[Birth]) -> Finding:
    cause = find_cause("optimizer-state-underflow")
    names = [role.removeprefix("param:") for birth in updates for role in _params(birth.op)]
    made = next(iter(evidence.given.optimizers), None)
    listed = ", ".join(dict.fromkeys(names[:3]))
    return Finding(
        cause,
        seen=f"finite gradients, and weights that are not finite after the step: {listed}; in FP32 they stay finite",
        fix=next(iter(cause.remedies), ""),
        module="optimizer.step",
        op=made.call if made else "",
    )


def _dead_moments(evidence: Evidence) -> float:
    """The largest share of second moments that were 0 in 16 bits, in a step before the one that failed."""
    failed = evidence.given.step_to_trace
    return max((e.data.get("dead_moments", 0.0) for e in evidence.given.of("step") if e.step < failed), default=0.0)


def _dead_state(evidence: Evidence, share: float) -> Finding:
    """A fused Adam divides by what it has before it rounds: no NaN in the step, but weights that run away."""
    made = next(iter(evidence.given.optimizers), None)
    cause = find_cause("optimizer-state-underflow")
    return Finding(
        cause,
        seen=f"{share:.0%} of the second moments are 0 in 16 bits where the gradient is not: each step divides by its "
        "own gradient alone, and the weights run away; in FP32 they do not",
        fix=next(iter(cause.remedies), ""),
        module="optimizer.step",
        op=made.call if made else "",
    )


def _params(op: Op) -> list[str]:
    return [operand.role for operand in op.inputs if operand.role.startswith("param:")]


def find_silent_damage(evidence: Evidence) -> list[Finding]:
    """What 16 bits lose without inf or NaN; nothing where FP32 does no better."""
    if evidence.fails or evidence.fails_in_fp32:
        return []
    for step in _steps_to_look_at(evidence):
        trace = evidence.trace(step)
        if trace is None:
            continue
        found = _look(evidence, trace)
        if found:
            evidence.found_in = trace
            return found
    return []


def _steps_to_look_at(evidence: Evidence) -> list[int]:
    skipped = set(evidence.given.skipped)  # their gradients are not finite, and no harm comes of it
    steps = [step for step in evidence.given.loss_steps if step not in skipped] or [0]
    order = [steps[len(steps) // 2], steps[-1], steps[0]]
    if evidence.given.seconds > SLOW:  # to get to a late step takes as long as the run did
        order = [steps[0], steps[min(EARLY, len(steps) // 2)], *order]
    return list(dict.fromkeys(order))


def _look(evidence: Evidence, trace: Trace) -> list[Finding]:
    behind = evidence.falls_behind
    findings: list[Finding] = []
    births = find_births(trace)
    # What damages the loss itself does harm in every step, also where all of so few were lost to a search for a scale.
    harmful = births if behind and is_harmful(trace) else [birth for birth in births if damages_loss(birth, trace)]
    findings += [describe_birth(birth) for birth in _distinct(harmful)]
    lost = silent.lost_gradients(trace)
    # A layer that stands still in 16 bits and moves in FP32 may matter little to the loss.
    frozen = {
        name: share
        for name, share in lost.items()
        if name in evidence.given.still and name in evidence.fp32.moved and evidence.motion(name) > MOVES
    }
    lost = lost if behind else frozen
    if lost:
        findings.append(_underflow(evidence, trace, lost))
    for op, share in [*silent.stuck_states(trace), *silent.stuck_sums(trace, ruinous=not behind)][:1]:
        findings.append(
            _at(op, "accumulator-stagnation", f"{share:.0%} of the elements that FP32 moves stay as they are")
        )
    for op, error in silent.stuck_scatters(trace, ruinous=not behind)[:1]:
        seen = f"the sums are off by {error:.0%} of their size, what is added by less than {silent.CLEAN:.0%}"
        fix = "total.float().index_add_(0, index, messages.float())  # add in FP32, round once"
        findings.append(replace(_at(op, "accumulator-stagnation", seen), fix=fix))
    seen_in_loss = behind or evidence.starts_apart
    for op, largest in silent.colliding_casts(trace)[:1]:
        if seen_in_loss:
            findings.append(describe_collision(op, largest))
    for op, error in silent.cancelled(trace)[:1]:
        if seen_in_loss:
            seen = f"the difference is off by {error:.0%} of its size, its operands by less than {silent.CLEAN:.0%}"
            findings.append(_at(op, "cancellation", seen))
    stuck = silent.stuck_updates(trace)
    if stuck and not lost and (evidence.falls_behind_by(SLOWLY) or evidence.stands_still):
        findings.append(_lost_update(evidence, stuck))
    return findings


def _at(op: Op, cause_id: str, seen: str) -> Finding:
    return describe_birth(Birth(op, cause_id, seen))


def _underflow(evidence: Evidence, trace: Trace, lost: dict[str, float]) -> Finding:
    worst = sorted(lost, key=lambda name: -lost[name])[:3]
    seen = ", ".join(f"{lost[name]:.0%} of {name}'s gradient" for name in worst) + " is 0 in 16 bits and not in FP32"
    cause = find_cause("gradient-underflow")
    op = silent.first_lost(trace)
    calls = [event for event in evidence.given.of("backward") if event.file]
    if evidence.given.kind == "train" and calls:
        return Finding(cause, seen, next(iter(cause.remedies), ""), "", calls[0].file, calls[0].line, "backward")
    module = worst[0].rpartition(".")[0]
    named = op if op is not None else None
    return Finding(
        cause,
        seen,
        next(iter(cause.remedies), ""),
        module,
        named.file if named else "",
        named.line if named else 0,
        f"{named.name}(backward)" if named else "backward",
    )


def _lost_update(evidence: Evidence, stuck: list[tuple[Op, float]]) -> Finding:
    cause = find_cause("update-lost-to-rounding")
    parts = [f"{share:.0%} of {_params(op)[0].removeprefix('param:')}" for op, share in stuck[:3] if _params(op)]
    made = next(iter(evidence.given.optimizers), None)
    return Finding(
        cause,
        seen=f"bit-identical after a step that moves them in FP32: {', '.join(parts)}",
        fix=next(iter(cause.remedies), ""),
        module="optimizer.step",
        op=made.call if made else "",
    )
