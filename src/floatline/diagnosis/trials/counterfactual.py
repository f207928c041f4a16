"""Counterfactuals: what is found is taken away by replay, what fixes the step comes first; and other formats tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from floatline.base.work_clock import WorkClock
from floatline.diagnosis.detectors.first_nonfinite import Birth, describe_birth, find_births, is_search, keep_harmful
from floatline.diagnosis.detectors.loss_scale import ScaleOutcome, ScaleVerdict, best_factor
from floatline.diagnosis.detectors.silent import find_damage
from floatline.diagnosis.evidence import Evidence
from floatline.diagnosis.trials.removals import Removal, find_removals, join_removals
from floatline.errors import FloatlineError, TargetError
from floatline.findings import Finding
from floatline.probe.runs.records import RunRecord
from floatline.probe.runs.runs import Change, replay_step, run_target
from floatline.probe.trace.trace import Op, Trace
from floatline.probe.watch.events import ScalerStepEvent

# A gradient this near to FP32's is that of a healthy 16-bit step.
AGREES = 0.1
# So is one whose error fell to this share of what it was.
HELPS = 0.25
# No update fixes a step whose gradient is this far off.
BROKEN = 0.5
MOST_REPLAYS = 4
# A run that an exception ended is tried for so many steps more.
MORE_STEPS = 9
# A whole run is tried again only where it has no more steps.
MOST_STEPS = 400


Place = tuple[str, str, str, int]  # cause, module, file, line


@dataclass(frozen=True)
class Counterfactual:
    """A step, or a run, replayed without one of the faults.

    Args:
        removal: What was taken away.
        remaining: Where something is still wrong.
        cures: Whether nothing is.
        text: The sentence about it.
        births: Where inf and NaN are born without what was removed.
        trace: The step; None where a whole run was replayed.
    """

    removal: Removal
    remaining: frozenset[Place]
    cures: bool
    text: str
    births: tuple[Birth, ...] = ()
    trace: Trace | None = None


@dataclass
class Choice:
    """Findings in the order of what their removal does, and a sentence for each trial."""

    findings: list[Finding]
    tried: list[str] = field(default_factory=list[str])


class Counterfactuals:
    """Replays within a budget.

    Args:
        evidence: The runs.
        budget: Seconds after which no further replay begins.
    """

    def __init__(self, evidence: Evidence, *, budget: float) -> None:
        self._evidence = evidence
        self._clock, self._budget = WorkClock(), budget
        self._left = MOST_REPLAYS
        self._left_out: list[str] = []  # what was not tried for want of time

    @property
    def may_try(self) -> bool:
        """Whether one more replay is within the budget, if it takes as long as recording the step did."""
        return self._left > 0 and self._has_time

    @property
    def _has_time(self) -> bool:
        return self._clock.seconds + self._evidence.seconds_of_trace < self._budget

    def choose(self, findings: list[Finding]) -> Choice:
        """Order findings: one whose removal fixes everything first, then what stays wrong without it."""
        trace = self._evidence.found_in
        removals = [(finding, find_removals(finding, trace, self._evidence)) for finding in findings]
        kept = {_key(finding) for finding, ways in removals if not ways}  # nothing is known against them
        trials: list[tuple[Finding, Counterfactual]] = []
        for finding, ways in removals:
            for removal in ways:
                trial = self.try_one(removal, finding)
                if trial is None:
                    continue
                trials = [(f, t) for f, t in trials if f is not finding] + [(finding, trial)]
                if trial.cures:
                    others = [f for f in findings if f is not finding and _key(f) in trial.remaining | kept]
                    return Choice([finding, *others], [trial.text])
        if not trials:
            return Choice(findings, self._left_out[:1])
        joint, suspects = self._join(trials, findings)
        if joint is not None and joint.cures:
            return Choice(suspects, [joint.text])
        return Choice(findings, [trial.text for _, trial in trials[:1] if trial.text])

    def _join(
        self, trials: list[tuple[Finding, Counterfactual]], findings: list[Finding]
    ) -> tuple[Counterfactual | None, list[Finding]]:
        """All removals at once, and with them that of a fault which hides behind the first, as far as it goes."""
        removals, suspects = [trial.removal for _, trial in trials], list(findings)
        last, joint = trials[0][1], None
        while self.may_try:
            hidden = [b for b in last.births if _place(b.cause, b.op) not in map(_key, suspects)]
            ways = [] if not hidden else find_removals(describe_birth(hidden[0]), last.trace, self._evidence)
            if ways:
                suspects.append(describe_birth(hidden[0]))
                removals.append(ways[0])
            if len(removals) < 2 or (joint is not None and not ways):
                break
            joint = self.try_one(join_removals(removals), *suspects)
            if joint is None or joint.cures:
                break
            last = joint
        return joint, suspects

    def measure_scale(self, factor: float) -> ScaleOutcome | None:
        """The recorded step with the loss multiplied by a factor."""
        trace = self._evidence.found_in
        if trace is None:
            return None
        if factor == 1.0:
            return _outcome(trace)
        replay = self._replay(int(trace.meta["step"]), Change(loss_factor=factor), "another loss scale")
        return None if replay is None else _outcome(replay[1])

    def try_one(self, removal: Removal, *findings: Finding) -> Counterfactual | None:
        """One replay without what is removed; None where it cannot be done."""
        if removal.whole_run:
            return self._try_run(removal)
        trace = self._evidence.found_in
        if trace is None:
            return None
        step = int(trace.meta["step"])
        replay = self._replay(step, removal.change, removal.text)
        if replay is not None and step in replay[0].skipped:
            # The scale is still searched for in this step, where nothing was applied before: take one that fits.
            fitting = replace(removal.change, loss_factor=removal.change.loss_factor * best_factor(replay[1]))
            replay = self._replay(step, fitting, removal.text) or replay
        return None if replay is None else self._judge_step(removal, *replay, trace, findings)

    def _replay(self, step: int, change: Change, what: str) -> tuple[RunRecord, Trace] | None:
        if not self._has_time:
            need = f"a replay takes about {self._evidence.seconds_of_trace:.2g} s here"
            self._left_out.append(f"{what} was not tried: {need}, more than the diagnosis has left")
        if not self.may_try:
            return None
        self._left -= 1
        self._evidence.on_progress(f"trying {what}")
        try:
            evidence = self._evidence
            return replay_step(evidence.target, step=step, steps=evidence.steps, seed=evidence.seed, change=change)
        except FloatlineError:
            return None

    def _judge_step(
        self, removal: Removal, record: RunRecord, trace: Trace, old: Trace, findings: Sequence[Finding]
    ) -> Counterfactual:
        scale = next((e.scale for e in reversed(record.of(ScalerStepEvent))), 1.0)
        births = [birth for birth in find_births(trace) if scale == 1.0 or not is_search(birth, scale)]
        births = keep_harmful(births, trace)
        before, after = _error(old), _error(trace)
        searched = int(trace.meta["step"]) in record.skipped and not births
        finite = record.exception is None and record.first_bad_step is None and not births
        finite = finite and (after is not None or searched)
        keys = {_place(birth.cause, birth.op) for birth in births}
        keys |= {_place(cause, op) for cause, op in find_damage(trace)}
        gone = not any(_key(finding) in keys for finding in findings)
        agrees = after is None or after < AGREES or (before is not None and after < HELPS * before)
        if before is not None and before < AGREES:  # the damage was not in the gradient
            agrees = after is not None and after < AGREES
        cures = finite and gone and agrees
        text = _say_step(removal, finite, after, keys)
        if finite and before is not None and before < AGREES:  # nothing is to be said about the gradient
            text = f"with {removal.text} the damage is gone" if cures else ""
        return Counterfactual(removal, frozenset(keys), cures, text, tuple(births), trace)

    def _try_run(self, removal: Removal) -> Counterfactual | None:
        """The whole run, for what shows over many steps only."""
        evidence = self._evidence
        if evidence.given.num_steps > MOST_STEPS:
            need = f"the run has {evidence.given.num_steps:,} steps, and none of more than {MOST_STEPS} is made again"
            self._left_out.append(f"{removal.text} was not tried: {need}")
            return None
        if not self.may_try:
            return None
        self._left -= 1
        evidence.on_progress(f"trying {removal.text}")
        raised = evidence.given.exception is not None
        steps = (
            evidence.given.num_steps + (MORE_STEPS if raised else 0)
            if evidence.given.kind == "build"
            else evidence.steps
        )
        try:
            record = run_target(evidence.target, steps=steps, seed=evidence.seed, change=removal.change)
        except FloatlineError:
            return None
        if record.exception is not None:
            return None
        before = None if evidence.found_in is None else _error(evidence.found_in)
        sound = before is None or before < BROKEN
        cures = record.first_bad_step is None and not evidence.is_behind(record) and sound
        text = f"with {removal.text}: {describe_run(record)}"
        return Counterfactual(removal, frozenset(), cures, text)


def try_formats(evidence: Evidence, findings: list[Finding], *, may_run: bool) -> tuple[str, ...]:
    """The run in BF16, where range or rounding is to blame and the run is short, and in FP32: one sentence each."""
    if not findings or evidence.given.exception is not None:
        return ()
    tried: list[str] = []
    given, numeric = evidence.given, findings[0].cause.family in ("range", "rounding")
    if may_run and numeric and evidence.fails and given.num_steps <= MOST_STEPS:
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
    fix = f"Scale the loss with torch.amp.GradScaler(init_scale={power})."
    if halves:
        fix = f"Multiply the loss by {power} in FP32 before the backward pass, and divide the gradients by it in FP32."
    return [replace(findings[0], fix=fix), *findings[1:]]


def describe_run(record: RunRecord) -> str:
    """How a run went, in a few words."""
    if record.exception is not None:
        return f"{record.exception.kind} at step {record.exception.step}"
    losses = record.losses
    text = f"the loss goes from {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} steps"
    if record.first_bad_step is not None:
        return f"{text}, and something is not finite from step {record.first_bad_step} on"
    return text if all(map(math.isfinite, losses)) else f"{text}, not always finite"


def _say_step(removal: Removal, finite: bool, error: float | None, keys: set[Place]) -> str:
    said = f"with {removal.text}"
    if finite and error is None:
        return f"{said} the step is finite but for the scale's own search"
    if finite and error is not None:
        return f"{said} the step is finite and its gradient {_match(error)}"
    if keys:
        cause, module, _, line = min(keys, key=lambda key: key[3])
        place = f" in {module}" if module else f" at line {line}" if line else ""
        return f"{said} the step is still not finite: {cause}{place}"
    return f"{said} the step is still not finite"


def _match(error: float) -> str:
    if error < AGREES:
        return f"matches FP32 to {100 * error:.2g} %"
    return f"is {100 * error:.0f} % off FP32"


def _key(finding: Finding) -> Place:
    return _place(finding.cause.id, finding)


def _place(cause: str, at: Finding | Op) -> Place:
    """What is lost on the way back has no line of its own: the first that shows it moves with the scale."""
    return (cause, "", "", 0) if cause == "gradient-underflow" else (cause, at.module, at.file, at.line)


def _error(trace: Trace) -> float | None:
    return trace.meta.get("gradients", {}).get("error")


def _outcome(trace: Trace) -> ScaleOutcome:
    found = trace.meta.get("gradients", {})
    return ScaleOutcome(float(found.get("lost", 0.0)), found.get("error") is not None)
