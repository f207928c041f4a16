"""find_in_script: the families of causes, asked of a script that ran once."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from floatline.base.patched_sources import read_source
from floatline.causes import find_cause
from floatline.diagnosis.detectors.damage import find_wrong_results
from floatline.diagnosis.detectors.exceptions import find_exceptions
from floatline.diagnosis.detectors.first_nonfinite import Birth
from floatline.diagnosis.detectors.learning import find_what_never_learns
from floatline.diagnosis.detectors.loop import find_loop_faults
from floatline.diagnosis.detectors.not_precision import first_birth_in_fp32, overflows
from floatline.diagnosis.detectors.numbers import (
    find_dead_state,
    find_failures,
    find_silent_damage,
    find_state_damage,
    name_zero_products,
)
from floatline.diagnosis.detectors.operations import FORMATS, ancestors
from floatline.diagnosis.detectors.resuming import find_schedule_ahead
from floatline.diagnosis.evidence import is_diverging, runs_away
from floatline.diagnosis.scripts.before_training import (
    find_damaged_setup,
    find_failing_setup,
    find_suspects_in_setup,
)
from floatline.diagnosis.scripts.evidence import ScriptEvidence, lacks_forward, starts_spoilt, step_fails
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.precision.user_frames import is_installed
from floatline.probe.runs.records import OptimizerRecord, RunRecord
from floatline.probe.trace.trace import Operand, Trace, Values
from floatline.probe.watch.events import ForwardEvent, StepEvent

# A run diverges where its weights go this far, against their size, and the loss grows by a factor on the way.
FAR, GROWN = 0.5, 5.0
# So do weights that go this far within a run, whatever the loss says.
VERY_FAR = 30.0
# Operations from an input of the model back to where the script may have rounded it: hardly more.
_FAR = 8


def find_in_script(evidence: ScriptEvidence, motion: float | None) -> list[Finding]:
    """What a script suffers from, the primary cause first.

    Args:
        evidence: The run and its recorded steps.
        motion: How far the weights went from their start, against their size; None where it is not known.
    """
    loop = _find_loop_faults(evidence)
    # Steps that are skipped for another cause than the search for a scale are to blame for a schedule that runs ahead.
    follows = evidence.fails and all(finding.cause.id == "scheduler-vs-skipped-step" for finding in loop)
    for family in (
        lambda: find_exceptions(evidence.given, None),
        lambda: find_failing_setup(evidence),  # before data is blamed for it
        lambda: [] if follows else loop,
        lambda: find_dead_state(evidence),  # weights that run away for it are no divergence
        lambda: _find_what_fp32_has_too(evidence, motion),
        lambda: find_failures(_without_history(evidence)),
        lambda: _find_overflow_without_scale(evidence),
        lambda: find_silent_damage(evidence),
        lambda: find_damaged_setup(evidence),
        lambda: find_what_never_learns(evidence),
        lambda: loop,
    ):
        found = family()
        if found:
            return found
    return []


def find_suspects(evidence: ScriptEvidence) -> list[Finding]:
    """What may be to blame if the losses of a run without a finding turn out to be apart from FP32's."""
    loop = find_loop_faults(evidence.given, None, fp32_learns=evidence.falls_behind)
    ahead = [finding for finding in loop if finding.cause.id == "scheduler-vs-skipped-step"]
    return ahead or find_suspects_in_setup(evidence) or find_silent_damage(replace(evidence, is_apart=True))


def find_otherwise(evidence: ScriptEvidence) -> list[Finding]:
    """What is to blame if what was called no matter of precision turns out not to happen in FP32."""
    states = find_state_damage(evidence.given, [one.trace for one in evidence.healthy])
    return states or (find_failures(_without_history(evidence)) if evidence.fails else find_suspects(evidence))


def find_suspects_beside(evidence: ScriptEvidence) -> list[Finding]:
    """What may be to blame, in work without gradients, if numbers that the script reads are apart from FP32's."""
    found: list[Finding] = []
    for trace in evidence.evaluations:
        found += find_wrong_results(trace)
    return list({(f.cause.id, f.file, f.line): f for f in found}.values())


def _find_overflow_without_scale(evidence: ScriptEvidence) -> list[Finding]:
    """What overflows at a scale of 1, too, where a scaler goes below it and trains on."""
    if evidence.fails or not evidence.overflows_unscaled:
        return []
    return find_failures(_without_history(replace(evidence, blames_skips=True)))


def _without_history(evidence: ScriptEvidence) -> ScriptEvidence:
    """The evidence without the losses that have been judged: they are the script's own, not those of a run in FP32."""
    return replace(evidence, fp32=replace(evidence.fp32, losses=[], loss_steps=[]))


def _find_loop_faults(evidence: ScriptEvidence) -> list[Finding]:
    found = find_loop_faults(evidence.given, None, fp32_learns=evidence.falls_behind)
    # Without FP32 no one can say that a schedule a little ahead did harm: it must be far ahead.
    ahead = find_schedule_ahead(evidence.given, evidence.fp32)
    found = [f for f in found if f.cause.id != "scheduler-vs-skipped-step" or ahead]
    found = [f for f in found if f.cause.id != "bad-input-data" or not _makes_inputs_in_16_bits(evidence)]
    return name_zero_products(found, evidence)


def _find_what_fp32_has_too(evidence: ScriptEvidence, motion: float | None) -> list[Finding]:
    """What is not finite in FP32 either, or a loss that grew before anything was not finite."""
    given = evidence.given
    losses = [loss for loss in evidence.fp32.losses if math.isfinite(loss)]
    if evidence.fails:
        trace = evidence.trace(given.step_to_trace, "fp32")
        if trace is not None and (starts_spoilt(trace) or lacks_forward(trace)):
            # What was not finite before the recorded part shows no cause.
            return [_divergence(given, losses, motion)] if _diverges(losses, motion) else []
        birth = None if trace is None or not step_fails(trace) else first_birth_in_fp32(trace)
        if birth is not None and not (birth.cause == "bad-input-data" and _makes_inputs_in_16_bits(evidence)):
            return [_rounded_before(birth, evidence) or _finding(birth, given)]
        if _diverges(losses, motion) or (trace is not None and step_fails(trace) and overflows(trace)):
            return [_divergence(given, losses, motion)]
    elif _ran_away(losses, motion) and not evidence.falls_behind:
        return [_divergence(given, losses, motion)]
    return []


def _makes_inputs_in_16_bits(evidence: ScriptEvidence) -> bool:
    """Whether the script computes what it gives to the model in 16 bits: inf is then no fault of the data alone."""
    for trace in (one.trace for one in evidence.captured):
        indices: list[int] = trace.meta.get("made_inputs", [])
        made = [trace.ops[i] for i in indices]
        ops = [*made, *(op for maker in made for operand in maker.inputs for op in ancestors(operand, trace, _FAR))]
        if any(out.dtype in FORMATS for op in ops for out in op.outputs):
            return True
    return False


def _ran_away(losses: list[float], motion: float | None) -> bool:
    """The same of losses that are all finite."""
    if motion is None or motion > FAR:
        return runs_away(losses) or (motion is not None and motion > VERY_FAR and _has_grown(losses, GROWN))
    return False


def _diverges(losses: list[float], motion: float | None) -> bool:
    """Whether losses grow because the weights run away; data that grows does not move them."""
    if motion is None:
        return is_diverging(losses)
    return motion > VERY_FAR or (motion > FAR and (is_diverging(losses) or _has_grown(losses, GROWN)))


def _has_grown(losses: list[float], factor: float) -> bool:
    late = [abs(loss) for loss in losses[-max(3, len(losses) // 5) :]]
    return len(losses) > 3 and statistics.median(late) > factor * max(abs(losses[0]), 1e-12)


def _rounded_before(birth: Birth, evidence: ScriptEvidence) -> Finding | None:
    """The finding, where what is exactly 0 was so small before the script cast it to 16 bits that it became 0 there.

    Of what a step reads, only its 16-bit form is known, and so its twins have these zeros, too.
    """
    trace = evidence.trace(evidence.given.step_to_trace)
    if birth.cause != "singular-gradient" or trace is None:
        return None
    op = trace.ops[birth.op.index if birth.op.forward is None else birth.op.forward]
    read = (leaf for operand in op.inputs if operand.value.zeros for leaf in _leaves(operand, trace))
    small = next((leaf for leaf in read if leaf.value.zeros and _holds_subnormals(leaf.value)), None)
    if small is None:
        return None
    value, name = small.value, small.role.rpartition(":")[2] or "what the step reads"
    seen = f"{birth.seen.removesuffix(', in FP32 too')}: {name} was {value.dtype} before the step, and holds "
    seen += f"{value.zeros:,} zeros beside numbers as small as {value.smallest:.3g}"
    return _finding(replace(birth, cause="rounded-onto-singularity", seen=seen), evidence.given)


def _leaves(operand: Operand, trace: Trace) -> list[Operand]:
    """What comes from outside the step, of what an operand was made of."""
    if operand.made_by is None:
        return [operand]
    return [own for op in ancestors(operand, trace, _FAR) for own in op.inputs if own.made_by is None]


def _holds_subnormals(value: Values) -> bool:
    return value.dtype in FORMATS and value.smallest < find_format(FORMATS[value.dtype]).min_normal


def _finding(birth: Birth, given: RunRecord) -> Finding:
    cause, op = find_cause(birth.cause), birth.op
    name = op.node if op.phase == "backward" and op.node else op.name
    file, line = op.file, op.line
    if birth.cause == "bad-input-data" and (is_installed(file) or birth.seen.startswith("inputs[")):
        calls = [event for event in given.of(ForwardEvent) if event.file]  # who gave it to the model
        file, line = (calls[0].file, calls[0].line) if calls else (file, line)
    return Finding(cause, birth.seen, cause.advice, op.module, file, line, name)


def _divergence(given: RunRecord, losses: list[float], motion: float | None) -> Finding:
    cause = find_cause("optimization-divergence")
    made = next(iter(given.optimizers), None)
    seen = f"the loss went from {losses[0]:.4g} to {max(map(abs, losses)):.4g} in {len(losses)} steps" if losses else ""
    if motion is not None:
        seen += f"{', and ' if seen else ''}the weights moved by {motion:.3g} times their size"
    seen += " before anything was not finite" if given.first_bad_step is not None else ""
    raised = None if made is None else _find_raised_rate(made, given)
    seen += "" if raised is None else f"; {raised[1]}"
    return Finding(
        cause,
        seen,
        cause.advice,
        "optimizer",
        made.file if made else "",
        raised[0] if raised else made.line if made else 0,
        made.call if made else "",
    )


def _find_raised_rate(made: OptimizerRecord, given: RunRecord) -> tuple[int, str] | None:
    """The line that raises a learning rate before the first step, and its numbers, if its file has one that sets one.

    A schedule sets rates by code of its own, and is to blame for nothing that holds from the first step on.
    """
    first = next((event for event in given.of(StepEvent) if event.optimizer == made.number), None)
    rate = max(first.rates, default=0.0) if first is not None else 0.0
    if not made.rate or rate < GROWN * made.rate:
        return None
    try:
        tree = ast.parse(read_source(Path(made.file)))
    except (OSError, SyntaxError, ValueError):
        return None
    statements = (node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AugAssign)))
    lines = {node.lineno for node in statements if any(map(_is_rate, _targets_of(node)))}
    said = f"the optimizer was made with a learning rate of {made.rate:.3g}, and begins with {rate:.3g}"
    return (lines.pop(), said) if len(lines) == 1 else None


def _targets_of(node: ast.Assign | ast.AugAssign) -> Sequence[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _is_rate(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and target.slice.value == "lr"
