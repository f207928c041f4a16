"""ScriptEvidence: what was seen of a script, which runs once: its recorded steps stand in for the run in FP32."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from floatline.diagnosis.beside_fp32 import StepErrors
from floatline.diagnosis.detectors.first_nonfinite import is_harmful, last_of_forward
from floatline.diagnosis.detectors.operations import FORMATS
from floatline.diagnosis.detectors.silent import STUCK_SHARE, is_decay, stuck_updates
from floatline.diagnosis.evidence import Evidence
from floatline.probe.runs.records import RunRecord
from floatline.probe.runs.runs import Precision
from floatline.probe.scripts.steps import Captured
from floatline.probe.trace.trace import Op, Operand, Phase, Trace, Values
from floatline.probe.watch.events import ScalerStepEvent
from floatline.workload import Target

# All gradients together, or one that is no small part of them, this far from FP32's are damaged.
DAMAGED, ONE_DAMAGED, NO_SMALL_PART = 0.15, 0.3, 0.02
# So far off none of them is by rounding alone; BF16 has some percent.
APART = 0.1
# Weights that are off by less than this share of their size are those of FP32: its own rounding is 6e-8 of a number,
# and of a large table a step may move few rows.
UNTOUCHED = 1e-9
# A weight of which an update leaves more than this share as it is has not moved.
FROZEN = 0.95


@dataclass
class ScriptEvidence(Evidence):
    """The run of a script, and the steps that were recorded of it.

    There is no run in FP32. Whether FP32 does better is asked of the FP32 twins of the recorded steps: a step fails
    in FP32 too where its twin does; training falls behind where the gradients or updates of most healthy steps that
    were recorded are far from their twins.

    Args:
        captured: What was recorded.
        setup: What the script computed in 16 bits before it trained; None where that is not known.
        evaluations: What it computed in 16 bits without gradients between steps.
        blames_skips: Whether steps that a scaler skipped count as failures, however few they are.
    """

    captured: list[Captured] = field(default_factory=list[Captured])
    setup: Trace | None = None
    evaluations: list[Trace] = field(default_factory=list[Trace])
    blames_skips: bool = False

    @property
    def keeps_skipping(self) -> bool:
        """Whether a scaler skips steps beyond what its search takes, or all that it skipped is to be explained."""
        return super().keeps_skipping or self.blames_skips

    def trace(self, step: int, precision: Precision | None = None) -> Trace | None:
        """The recorded step that tells most about one; as FP32 would have had it, where that is asked for."""
        known = self.failed if self.fails else self.healthy
        if not known:
            return None
        nearest = min(known, key=lambda one: abs(one.step - step))
        if nearest.kind == "skipped":
            nearest = self._find_smallest_scale(known) or nearest
        return nearest.trace if precision is None else view_in_fp32(nearest.trace)

    def _find_smallest_scale(self, skipped: list[Captured]) -> Captured | None:
        """The skipped step with the smallest scale, down to 1: what fails there does not fail for want of a scale."""
        scales = {event.step: event.scale for event in self.given.of(ScalerStepEvent)}
        large = [one for one in skipped if scales.get(one.step, 0.0) >= 1.0]
        large = [one for one in large if is_harmful(one.trace)] or large
        return min(large, key=lambda one: scales[one.step], default=None)

    @property
    def healthy(self) -> list[Captured]:
        """Recorded steps that were applied."""
        return [one for one in self.captured if one.kind == "healthy"]

    @property
    def failed(self) -> list[Captured]:
        """Recorded steps that failed; skipped ones only where the scaler keeps skipping."""
        failed = [one for one in self.captured if one.kind == "failed"]
        return failed or [one for one in self.captured if one.kind == "skipped"]

    @property
    def falls_behind(self) -> bool:
        """Whether the gradients of the first healthy step and of most that were recorded are damaged.

        Those of a model that has converged are only late; those of one that damage has killed, only early.
        """
        damaged = [_is_damaged(one.trace) for one in self.healthy]
        return self.is_apart or (bool(damaged) and damaged[0] and sum(damaged) > len(damaged) / 2)

    def rounds_only_loss(self, errors: StepErrors) -> bool:
        """Nobody knows before the script runs in FP32; it is asked then."""
        del errors
        return False

    @property
    def starts_apart(self) -> bool:
        """Whether the gradients of every healthy step that was recorded are off by more than rounding alone does.

        That is too little to say that training falls behind, and enough where an operation is known that does it.
        """
        errors = [_error_of_gradients(one.trace) for one in self.healthy]
        return bool(errors) and all(error > APART for error in errors)

    def falls_behind_by(self, share: float) -> bool:
        """The same, or that most weights stand still in most of them, or that all of one do in the whole run.

        In the first and the last, too: a rate that warms up or decays loses updates at one end, and that is meant.
        """
        del share
        stuck = [_share_of_lost_updates(one.trace) > STUCK_SHARE for one in self.healthy]
        most = bool(stuck) and stuck[0] and stuck[-1] and sum(stuck) > len(stuck) / 2
        return self.falls_behind or most or self._has_frozen_weight

    @property
    def _has_frozen_weight(self) -> bool:
        """Whether a weight is bit for bit what it was, and every recorded step would have moved it in FP32."""
        stuck = [_frozen_by(one.trace) for one in self.healthy]
        return len(stuck) > 1 and not set.intersection(*stuck).isdisjoint(self.given.still)

    def motion(self, name: str) -> float:
        """1 for a parameter whose gradient is all but lost in every healthy step, else 0."""
        gradients = [one.trace.gradients.get(name) for one in self.healthy]
        values = [operand.value for operand in gradients if operand is not None]
        return float(bool(values) and all((v.lost or 0) > 0.95 * (v.numel - v.zeros + (v.lost or 0)) for v in values))


def stand_in_for_fp32(given: RunRecord) -> RunRecord:
    """A record instead of the FP32 run: the losses up to the failure, and all parameters as moved."""
    end = given.first_bad_step
    kept = [(x, s) for x, s in zip(given.losses, given.loss_steps, strict=True) if end is None or s < end]
    return RunRecord(
        kind="train",
        entry=given.entry,
        precision="fp32",
        file=given.file,
        losses=[loss for loss, _ in kept],
        loss_steps=[step for _, step in kept],
        num_steps=given.num_steps,
        moved=[*given.moved, *given.still],
    )


def fails_in_fp32(evidence: ScriptEvidence) -> bool | None:
    """Whether the FP32 twin of the recorded failing step is not finite, too; None where none was recorded."""
    trace = evidence.trace(evidence.given.step_to_trace, "fp32") if evidence.fails and evidence.failed else None
    if trace is None or starts_spoilt(trace) or lacks_forward(trace) or reads_inf(trace):
        return None
    return step_fails(trace)


def step_fails(trace: Trace) -> bool:
    """Whether the loss or the gradients of a recorded step are not finite."""
    last = last_of_forward(trace)
    ends = [*(operand.value for operand in trace.gradients.values()), *(last.outputs if last is not None else ())]
    return any(value.nonfinite for value in ends)


def starts_spoilt(trace: Trace) -> bool:
    """Whether the forward pass read a weight that was NaN or +inf: what made it so lies before the step."""
    operands = (operand for op in trace.ops for operand in op.inputs if op.phase == "forward")
    return any(o.role.startswith("param:") and (o.value.nan or o.value.pos_inf) for o in operands)


def reads_inf(trace: Trace) -> bool:
    """Whether the step read inf or NaN that was there before it: 16 bits may have made it, and its twin has it, too."""
    ops = (op for op in trace.ops if op.phase in ("forward", "outside"))
    return any((o.value.pos_inf or o.value.nan) and o.made_by is None for op in ops for o in op.inputs)


def lacks_forward(trace: Trace) -> bool:
    """Whether the first that is not finite comes to a backward pass from a forward pass that was not recorded."""
    phases = ("forward", "backward")
    first = next((op for op in trace.ops if op.phase in phases and any(v.nonfinite for v in op.outputs)), None)
    if first is None or first.phase != "backward":
        return False
    return any(o.value.nonfinite and o.made_by is None and not o.role for o in first.inputs)


def make_target(text: str) -> Target:
    """A target that nothing can run again."""
    return Target(text, None, None, Path())


def _error_of_gradients(trace: Trace) -> float:
    """How far all gradients together are from FP32's; 0 where that is not known, since only their twins are not finite.

    A twin passes through the masks of the step: what is filled in where a 16-bit number is 0 may leave the twin's own
    zeros as they are.
    """
    error: float | None = trace.meta.get("gradients", {}).get("error", 0.0)
    if error is not None:
        return error
    return math.inf if any(operand.value.nonfinite for operand in trace.gradients.values()) else 0.0


def _is_damaged(trace: Trace) -> bool:
    if not _reaches_weights(trace):
        return False
    if _error_of_gradients(trace) > DAMAGED:
        return True
    values = [operand.value for operand in trace.gradients.values()]
    top = max((value.twin_largest or 0.0 for value in values), default=0.0)
    return any(
        (value.error or 0.0) > ONE_DAMAGED and value.numel >= 4 and (value.twin_largest or 0.0) > NO_SMALL_PART * top
        for value in values
    )


def _reaches_weights(trace: Trace) -> bool:
    """Whether the weights after the step are not those of FP32, by more than FP32 rounds away itself.

    A model that has nothing more to learn has gradients of next to nothing, and what is wrong with them costs nothing.
    """
    updates = (op for op in trace.ops if op.phase == "update" and op.inputs and op.outputs)
    written = [op.outputs[0] for op in updates if op.inputs[0].role.startswith("param:")]
    if not written or any(value.error is None for value in written):
        return True  # it was not seen
    top = max(value.largest for value in written)
    return any((value.error or 0.0) > UNTOUCHED for value in written if value.largest > NO_SMALL_PART * top)


def _share_of_lost_updates(trace: Trace) -> float:
    """Elements of 16-bit weights that their update leaves as they are, of all that it would move in FP32."""
    updates = (op for op in trace.ops if op.phase == "update" and _writes_weight(op) and not is_decay(op))
    moved = sum(op.moved or 0 for op in updates)
    return sum(op.stuck or 0 for op, _ in stuck_updates(trace)) / moved if moved else 0.0


def _frozen_by(trace: Trace) -> set[str]:
    """Names of 16-bit weights of which nearly no element moves in the step."""
    ops = [op for op, share in stuck_updates(trace) if share > FROZEN]
    roles = (operand.role for op in ops for operand in op.inputs)
    return {role.removeprefix("param:") for role in roles if role.startswith("param:")}


def _writes_weight(op: Op) -> bool:
    return any(operand.role.startswith("param:") for operand in op.inputs)


def view_in_fp32(trace: Trace) -> Trace:
    """The step as its FP32 twins had it, as far as they tell.

    Numerics:
        What only 16 bits blew up or lost is finite and not zero again, also in the FP32 tensors that were made of it:
        autocast computes logarithms and sums of 16-bit numbers in FP32. Where the twin is not finite either, the counts
        of inf and NaN are those of the step. Data from outside that is not finite counts as an input of the loss.
        Checked by tests/diagnosis/scripts/test_scripts_under_cuda_lists.py.
    """
    ops = [
        replace(
            op,
            inputs=[_widen(operand, op.phase) for operand in op.inputs],
            outputs=[_as_twin(value) for value in op.outputs],
        )
        for op in trace.ops
    ]
    return Trace(
        ops, {name: _widen(operand, "backward") for name, operand in trace.gradients.items()}, dict(trace.meta)
    )


def _widen(operand: Operand, phase: Phase) -> Operand:
    value = _as_twin(operand.value)
    # What a backward pass finds are the gradients of a pass before it.
    from_outside = phase != "backward" and operand.made_by is None and not operand.role
    from_outside = from_outside and value.numel > 1 and value.nan > 0
    return replace(operand, value=value, role="inputs of the loss" if from_outside else operand.role)


def _as_twin(value: Values) -> Values:
    if value.twin_nonfinite is None:
        return value
    fine = not value.twin_nonfinite
    return replace(
        value,
        dtype="float32" if value.dtype in FORMATS else value.dtype,
        zeros=value.zeros - (value.lost or 0),
        pos_inf=0 if fine else value.pos_inf,
        neg_inf=0 if fine else value.neg_inf,
        nan=0 if fine else value.nan or int(not (value.pos_inf or value.neg_inf)),
        largest=value.twin_largest if value.twin_largest is not None else value.largest,
    )
