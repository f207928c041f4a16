"""From traces to findings: range and rounding in a failing step, silent damage in one that does not fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from floatline.base.patched_sources import read_source
from floatline.base.texts import percent
from floatline.causes import find_cause
from floatline.diagnosis.beside_fp32 import StepErrors
from floatline.diagnosis.detectors import silent
from floatline.diagnosis.detectors.damage import (
    describe_cancellation,
    find_any_damage,
    find_spoilt_states,
    place_state,
)
from floatline.diagnosis.detectors.exceptions import describe_collision
from floatline.diagnosis.detectors.first_nonfinite import (
    Birth,
    damages_loss,
    describe_birth,
    find_births,
    find_unfit_constants,
    is_harmful,
    is_search,
    keep_harmful,
    measure_step_errors,
)
from floatline.diagnosis.detectors.kernels import find_wrong_kernels
from floatline.diagnosis.detectors.not_precision import first_birth_in_fp32, overflows
from floatline.diagnosis.detectors.operations import base_name
from floatline.diagnosis.detectors.scaler_order import find_steps_past_overflow
from floatline.diagnosis.evidence import Evidence, is_diverging, runs_away
from floatline.diagnosis.lost_decay import DECAYED, LostDecay
from floatline.findings import Finding
from floatline.precision.user_frames import is_installed
from floatline.probe.runs.records import RunRecord
from floatline.probe.trace.trace import Op, Trace
from floatline.probe.watch.events import BackwardEvent, CastEvent, ScalerStepEvent, StepEvent

# A layer that stands still must be this far from FP32's: less is what a converged model does.
MOVES = 0.01
# Updates that are lost show in a slow run, too: a share of the loss that is above what rounding does to it.
SLOWLY = 0.002

# Share of second moments that are 0 while the first are not: above it, it is no accident.
DEAD = 0.05

# Steps from which on a run is not repeated lightly.
LONG = 400
# A step that is soon reached, and by which averages and counters have begun.
EARLY = 8


def find_failures(evidence: Evidence) -> list[Finding]:
    """Why loss, gradients or weights are not finite, or the loss grows without end."""
    if _grows_in_fp32(evidence):
        return [_divergence(evidence)]
    if not evidence.fails:
        return []
    if not evidence.fails_in_fp32:
        found = _fails_in_16_bits(evidence)
        # Gradients that overflow by the loss scale are what its search is for: to blame is who makes the step then.
        by_scale = bool(found) and found[0].cause.id == "gradient-overflow"
        return [*(find_steps_past_overflow(evidence.given) if by_scale else []), *found]
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
    dead = find_dead_state(evidence)
    if dead:
        return dead
    scale = evidence.scale_at(evidence.given.step_to_trace)
    searches = scale != 1.0 and not _stays_too_large(evidence.given)
    births = [birth for birth in find_births(trace) if not searches or not is_search(birth, scale)]
    harmful = keep_harmful(births, trace)
    wrong = find_wrong_kernels(trace, until=harmful[0].op if harmful else None, ruinous=True)
    if wrong:
        return wrong
    if harmful:
        return [_place_in_loop(describe_birth(birth), birth, evidence) for birth in _distinct(harmful)]
    updates = find_births(trace, phases=("update",))
    if updates:
        return [_state_underflow(evidence, updates)]
    return [describe_birth(birth) for birth in _distinct(find_unfit_constants(trace))]


def _stays_too_large(given: RunRecord) -> bool:
    """Whether no step was ever applied, and nothing lowers the scale."""
    tried = given.of(ScalerStepEvent)
    return not any(e.applied for e in tried) and len({e.scale for e in tried}) == 1


def _distinct(births: list[Birth]) -> list[Birth]:
    """The first birth, and others of another place or cause; what a birth leads to is not told apart here."""
    seen: dict[tuple[str, str, int], Birth] = {}
    for birth in births:
        seen.setdefault((birth.cause, birth.op.file, birth.op.line), birth)
    return list(seen.values())[:3]


def _place_in_loop(finding: Finding, birth: Birth, evidence: Evidence) -> Finding:
    """A loss that the user's loop multiplied by itself overflows where it goes backward: that line is to blame."""
    calls = [event for event in evidence.given.of(BackwardEvent) if event.file]
    by_hand = any(event.by_hand != 1.0 for event in calls)
    if birth.cause != "gradient-overflow" or evidence.given.kind != "train" or not by_hand:
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


def name_zero_products(found: list[Finding], evidence: Evidence) -> list[Finding]:
    """Findings; a product with 0 instead of data that is not finite, where that is all that the data meets."""
    if not found or found[0].cause.id != "bad-input-data":
        return found
    bad = evidence.fp32.first_bad_step
    trace = evidence.trace(evidence.given.step_to_trace if bad is None else bad, "fp32")
    birth = None if trace is None else first_birth_in_fp32(trace)
    return [describe_birth(birth)] if birth is not None and birth.cause == "nan-times-zero" else found


def _divergence(evidence: Evidence) -> Finding:
    cause = find_cause("optimization-divergence")
    losses = evidence.fp32.losses
    made = next(iter(evidence.given.optimizers), None)
    return Finding(
        cause,
        seen=f"in FP32 the loss goes from {losses[0]:.4g} to {max(map(abs, losses)):.4g} in {len(losses)} steps",
        fix=cause.advice,
        module="optimizer",
        file=made.file if made else "",
        line=made.line if made else 0,
        op=made.call if made else "",
    )


def _state_underflow(evidence: Evidence, updates: list[Birth]) -> Finding:
    cause = find_cause("optimizer-state-underflow")
    names = [role.removeprefix("param:") for birth in updates for role in _params(birth.op)]
    made = next(iter(evidence.given.optimizers), None)
    place = _find_narrowing(evidence.given)
    listed = ", ".join(dict.fromkeys(names[:3]))
    named = f": {listed}" if listed else ""
    return Finding(
        cause,
        seen=f"finite gradients, and weights that are not finite after the step{named}; in FP32 they stay finite",
        fix=cause.advice,
        module="optimizer.step",
        file=place[0],
        line=place[1],
        op=made.call if made else "",
    )


def find_dead_state(evidence: Evidence) -> list[Finding]:
    """Second moments that are 0 in 16 bits, before the step that failed, if one did.

    A fused Adam adds eps in FP32: there is no NaN in the step, but weights run away.
    """
    steps = [e for e in evidence.given.of(StepEvent) if not evidence.fails or e.step < evidence.given.step_to_trace]
    share: float = max((e.dead_moments for e in steps), default=0.0)
    if share <= DEAD:
        return []
    made = next(iter(evidence.given.optimizers), None)
    place = _find_narrowing(evidence.given)
    cause = find_cause("optimizer-state-underflow")
    finding = Finding(
        cause,
        seen=f"{percent(share)} of the second moments are 0 in 16 bits, and what is divided by them is not: the step "
        "moves these weights many times too far; in FP32 they are not 0",
        fix=cause.advice,
        module="optimizer.step",
        file=place[0],
        line=place[1],
        op=made.call if made else "",
    )
    return [finding]


def find_state_damage(given: RunRecord, traces: Sequence[Trace]) -> list[Finding]:
    """States of optimizers that hold inf or 0 in 16 bits where FP32 does not, in the last step that shows it."""
    stepping = {(event.file, event.line) for event in given.of(StepEvent) if event.file}
    for trace in reversed(traces):
        states = find_spoilt_states(trace)
        if states:
            return [place_state(state, _find_narrowing(given), stepping) for state in states[:1]]
    return []


def _params(op: Op) -> list[str]:
    return [operand.role for operand in op.inputs if operand.role.startswith("param:")]


def find_silent_damage(evidence: Evidence) -> list[Finding]:
    """What 16 bits lose without inf or NaN; nothing where FP32 does no better."""
    if evidence.fails or evidence.fails_in_fp32:
        return []
    dead = find_dead_state(evidence)
    if dead:
        return dead
    looked_at: list[Trace] = []
    for step in _steps_to_look_at(evidence):
        trace = evidence.trace(step)
        if trace is None:
            continue
        found = _look(evidence, trace)
        if found:
            evidence.found_in = trace
            return found
        looked_at.append(trace)
    return _look_for_any(evidence, looked_at) if evidence.is_apart else []


def _look_for_any(evidence: Evidence, traces: Sequence[Trace]) -> list[Finding]:
    """What does harm in a run that falls behind, where no known way of losing numbers is seen."""
    if evidence.rounds_only_loss(StepErrors(*measure_step_errors(traces))):
        return []
    states = find_state_damage(evidence.given, traces)
    if states:
        return states
    for trace in traces:
        found = find_any_damage(trace)
        if found:
            evidence.found_in = trace
            return found
    return []


def _steps_to_look_at(evidence: Evidence) -> list[int]:
    skipped = set(evidence.given.skipped)  # their gradients are not finite, and no harm comes of it
    steps = [step for step in evidence.given.loss_steps if step not in skipped] or [0]
    order = [steps[len(steps) // 2], steps[-1], steps[0]]
    if evidence.given.num_steps > LONG:  # to get to a late step takes as long as the run did
        order = [steps[0], steps[min(EARLY, len(steps) // 2)], *order]
    return list(dict.fromkeys(order))


def _look(evidence: Evidence, trace: Trace) -> list[Finding]:
    behind = evidence.falls_behind
    ruinous = find_wrong_kernels(trace, ruinous=True)
    if ruinous:  # what is seen after them may come of them
        return ruinous
    # A kernel that is less exact than most is not to blame for a run that learns what FP32 does.
    findings = find_wrong_kernels(trace) if behind or evidence.starts_apart else []
    births = find_births(trace)
    # What damages the loss itself does harm in every step, also where all of so few were lost to a search for a scale.
    harmful = births if behind and is_harmful(trace) else [birth for birth in births if damages_loss(birth, trace)]
    findings += [_place_in_loop(describe_birth(birth), birth, evidence) for birth in _distinct(harmful)]
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
            _at(op, "accumulator-stagnation", f"{percent(share)} of the elements that FP32 moves stay as they are")
        )
    for op, error in silent.stuck_scatters(trace, ruinous=not behind)[:1]:
        seen = f"the sums are off by {percent(error)} of their size, what is added by less than {percent(silent.CLEAN)}"
        fix = "Add these up in an FP32 tensor, and round once at the end."
        findings.append(replace(_at(op, "accumulator-stagnation", seen), fix=fix))
    seen_in_loss = behind or evidence.starts_apart
    for op, largest in silent.colliding_casts(trace)[:1]:
        if seen_in_loss:
            findings.append(describe_collision(op, largest))
    for op, error in silent.cancelled(trace)[:1]:
        if seen_in_loss:
            findings.append(describe_cancellation(op, error, trace))
    for op, error in silent.amplified(trace)[:1]:
        if behind and not findings:
            findings.append(_amplified(op, error))
    stuck = silent.stuck_updates(trace)
    if stuck and not lost and (evidence.falls_behind_by(SLOWLY) or evidence.stands_still):
        findings.append(_lost_update(evidence, stuck))
    return findings or _lost_decay(evidence, trace)


def _amplified(op: Op, error: float) -> Finding:
    size = max(operand.value.largest for operand in op.inputs)
    read = f"numbers up to {size:.4g}, off by less than {percent(silent.CLEAN)}"
    return _at(op, "integer-not-exact", f"{base_name(op.name)} of {read}, is off by {percent(error)} of its size")


def _at(op: Op, cause_id: str, seen: str) -> Finding:
    return describe_birth(Birth(op, cause_id, seen))


def _underflow(evidence: Evidence, trace: Trace, lost: dict[str, float]) -> Finding:
    worst = sorted(lost, key=lambda name: -lost[name])[:3]
    seen = (
        ", ".join(f"{percent(lost[name])} of {name}'s gradient" for name in worst) + " is 0 in 16 bits and not in FP32"
    )
    cause = find_cause("gradient-underflow")
    op = silent.first_lost(trace)
    calls = [event for event in evidence.given.of(BackwardEvent) if event.file]
    if evidence.given.kind == "train" and calls:
        return Finding(cause, seen, cause.advice, "", calls[0].file, calls[0].line, "backward")
    module = worst[0].rpartition(".")[0]
    named = op if op is not None else None
    return Finding(
        cause,
        seen,
        cause.advice,
        module,
        named.file if named else "",
        named.line if named else 0,
        f"{named.name}(backward)" if named else "backward",
    )


def _find_narrowing(given: RunRecord) -> tuple[str, int]:
    """File and line where 16-bit weights come from: the last cast of a model, or else where they are updated.

    The loop of a build() is floatline's, and casts because the file names a precision: that is the line.
    """
    if given.kind == "build":
        return _find_precision(given)
    casts = [event for event in given.of(CastEvent) if event.file]
    if casts:
        return casts[-1].file, casts[-1].line
    made = next(iter(given.optimizers), None)
    return (made.file, made.line) if made is not None else ("", 0)


def _find_precision(given: RunRecord) -> tuple[str, int]:
    """File and line where a build() names its precision; none where it is not written out."""
    from floatline.fixes.spanning.precisions import find_precision_line  # libcst: not where a script runs

    try:
        text = read_source(given.file).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return "", 0
    line = find_precision_line(text, entry=given.entry)
    return (given.file, line) if line else ("", 0)


def _lost_decay(evidence: Evidence, trace: Trace) -> list[Finding]:
    """Weights that keep a size which FP32's decay takes from them, seen at the end of the run, or in its losses."""
    lost = find_lost_decay(evidence, trace)
    if lost is None:
        return []
    grown = evidence.growth(lost.names)
    return [lost.finding] if (evidence.is_apart if grown is None else lost.shows_in(grown, lost.num_steps)) else []


def find_lost_decay(evidence: Evidence, trace: Trace) -> LostDecay | None:
    """A decay that 16-bit weights do not show; None also where FP32's would take little in as many steps."""
    stuck = [(op, share) for op, share in silent.stuck_decays(trace) if _params(op) and op.scalars]
    factor = stuck[0][0].scalars[0] if stuck else 1.0
    num_steps = evidence.given.num_steps - len(set(evidence.given.skipped))
    due = 1 - factor**num_steps if 0 < factor < 1 else 0.0
    if due < DECAYED:
        return None
    seen = (
        f"a decay to {factor:.6g} of their size leaves {name_shares(stuck)} bit-identical; "
        f"in FP32 it takes {percent(due)} of them in {num_steps:,} steps"
    )
    finding = _of_weights(evidence, "decay-lost-to-rounding", seen)
    made, op = next(iter(evidence.given.optimizers), None), stuck[0][0]
    if made is not None and not made.name.startswith("torch.") and op.file and not is_installed(op.file):
        finding = replace(finding, file=op.file, line=op.line, op=op.name)  # the optimizer is the user's own
    names = tuple(name.removeprefix("param:") for op, _ in stuck for name in _params(op))
    return LostDecay(finding, factor, names, num_steps)


def _lost_update(evidence: Evidence, stuck: list[tuple[Op, float]]) -> Finding:
    seen = f"bit-identical after a step that moves them in FP32: {name_shares(stuck)}"
    return _of_weights(evidence, "update-lost-to-rounding", seen)


def name_shares(stuck: list[tuple[Op, float]]) -> str:
    """Up to three weights and their shares, the worst first; of operations on one weight the first counts."""
    shares: dict[str, float] = {}
    for op, share in stuck:
        for name in _params(op)[:1]:
            shares.setdefault(name.removeprefix("param:"), share)
    return ", ".join(f"{percent(share)} of {name}" for name, share in [*shares.items()][:3])


def _of_weights(evidence: Evidence, cause_id: str, seen: str) -> Finding:
    """What an optimizer's step loses of 16-bit weights, at the line that made them so."""
    cause = find_cause(cause_id)
    made = next(iter(evidence.given.optimizers), None)
    place = _find_narrowing(evidence.given)
    return Finding(
        cause,
        seen,
        fix=cause.advice,
        module="optimizer.step",
        file=place[0],
        line=place[1],
        op=made.call if made else "",
    )
