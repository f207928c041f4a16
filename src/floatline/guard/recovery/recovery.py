"""Recovery: what to do about bad steps, decided on the host from numbers that every process shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from floatline.errors import GuardError
from floatline.guard.policy import Policy
from floatline.guard.recovery.actions import (
    AcceptRegime,
    Action,
    Alarm,
    AskCanary,
    CheckWeights,
    Escalate,
    RaiseScale,
    Rollback,
    Stop,
    Warn,
    stop_at_bad_row,
    stop_at_collapse,
    stop_at_lost_weights,
    stop_at_low_success,
    stop_at_spent_rollbacks,
)


@dataclass
class RecoveryCounts:
    """Streaks, rollbacks and the outcomes of the last steps."""

    attempt: int = -1  # the last that was seen
    bad: int = 0  # skipped steps since the last applied one
    bad_since: int = 0  # attempt of the first of them
    collapses: int = 0  # overflows in a row at the smallest scale
    nonfinite: int = 0  # non-finite losses since the last applied step
    outliers: int = 0  # of loss or norm, since the last applied step
    outlier_since: int = 0
    loss_outliers: int = 0  # in a row
    sound: bool = False  # the canary was sound since the last applied step
    rollbacks: int = 0
    since_rollback: int = 0  # applied steps
    undone: int = -1  # steps up to this attempt were under way at the last rollback
    accepted: int = -1  # outliers up to this attempt were judged by windows that are gone
    scaled: bool = False  # a scale above the smallest was seen
    question: str = ""  # why weights or canary were asked for
    outcomes: str = ""  # of the last `success_window` steps: 1 applied, 0 skipped
    noted: int = -1  # the last outlier that was trained on

    def end_streaks(self) -> None:
        """Start again with what is counted in a row."""
        self.bad = self.collapses = self.nonfinite = self.outliers = self.loss_outliers = 0
        self.sound, self.question = False, ""

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> RecoveryCounts:
        """What `as_json` was called on; GuardError for anything else."""
        state = {"noted": -1, **state}  # checkpoints of version 0.1 do not have it
        for field in fields(cls):
            value = state.get(field.name)
            if type(value).__name__ != field.type:
                raise GuardError(
                    f"The state of recovery has {field.name} = {value!r:.40}, not of type {field.type}. "
                    "Load a checkpoint of this version."
                )
        return cls(**{field.name: state[field.name] for field in fields(cls)})


__all__ = [
    "AcceptRegime",
    "Action",
    "AskCanary",
    "CheckWeights",
    "Escalate",
    "RaiseScale",
    "Recovery",
    "Rollback",
    "SeenStep",
    "Stop",
    "Warn",
]

BURST = 16
"""Ordinary steps after which an outlier is spoken of again."""

RECHECK_EVERY = 10
"""Non-finite losses between two looks at the weights, which may have been damaged meanwhile."""


@dataclass(frozen=True, slots=True)
class SeenStep:
    """What one step came to.

    Args:
        attempt: Number of the step.
        reason: Word of `ledger.lines.REASONS`; None where the step was applied.
        loss: As it was.
        grad_norm: Of the unscaled gradients.
        scale: The one this step used.
        loss_score: Outlier score of the loss; NaN where there is none.
        norm_score: Outlier score of the norm; NaN where there is none.
    """

    attempt: int
    reason: str | None
    loss: float
    grad_norm: float
    scale: float
    loss_score: float
    norm_score: float


class Recovery:
    """The state machine of a run.

    It gets one step after the other and answers with actions. The guard carries them out in order, and gives the
    answers to CheckWeights and AskCanary back before the next step, until no action is left.

    An applied step ends every streak. A step that was skipped for one reason neither ends nor lengthens the streak of
    another, because damaged weights show as overflow, NaN and outliers by turns. There are two exceptions: a finite
    gradient at the smallest scale ends a collapse, and an ordinary loss ends a row of loss outliers. Steps skipped on
    request count nowhere.

    Args:
        policy: The numbers.
        floor: The smallest loss scale; None where the loss is not scaled.
        can_probe: There is a canary batch.
        can_roll_back: There is room for snapshots.

    Attributes:
        floor, can_probe, can_roll_back: As given; the guard changes them where the run does.
    """

    def __init__(self, policy: Policy, *, floor: float | None, can_probe: bool, can_roll_back: bool) -> None:
        self.floor = floor
        self.can_probe = can_probe
        self.can_roll_back = can_roll_back
        self._policy = policy
        self._now = RecoveryCounts()

    @property
    def healthy(self) -> bool:
        """Whether the last step that was seen was applied: only then is a snapshot worth taking."""
        return not self._now.bad

    def observe(self, seen: SeenStep) -> list[Action]:
        """What is to be done about a step; attempts must come in order."""
        if seen.reason == "requested":
            return []
        now = self._now
        now.attempt = seen.attempt
        now.scaled |= self.floor is not None and seen.scale > self.floor
        applied = seen.reason is None
        now.outcomes = (now.outcomes + str(int(applied)))[-self._policy.success_window :]
        if seen.attempt <= now.undone:
            return []
        if applied:
            now.end_streaks()
            now.since_rollback += 1
            if now.since_rollback >= self._policy.forget_rollbacks:
                now.rollbacks = 0
            return self._note_outlier(seen)
        now.bad += 1
        if now.bad == 1:
            now.bad_since = seen.attempt
        alarm: list[Action] = []
        if now.bad == self._policy.warn_after:
            alarm = [Alarm(now.bad, now.bad_since, seen.reason or "")]
        return [*alarm, *self._act_on(seen)]

    def _act_on(self, seen: SeenStep) -> list[Action]:
        """What is to be done about a step that was skipped."""
        now = self._now
        actions: list[Action] = []
        if seen.reason == "overflow":
            actions = self._on_overflow(seen)
        elif seen.reason == "forward-nonfinite":
            actions = self._on_nonfinite()
        elif seen.reason == "outlier" and seen.attempt > now.accepted:
            now.collapses = 0
            actions = self._on_outlier(seen)
        return actions or self._check_limits()

    def weights_checked(self, finite: bool) -> list[Action]:
        """The answer to CheckWeights."""
        now = self._now
        if not finite:
            now.question = "weights"
            return self._roll_back(now.bad_since)
        if now.question == "collapse":
            return [stop_at_collapse(now.collapses, now.attempt, self.floor if now.scaled else None)]
        if now.question == "nonfinite" and self.can_probe:
            return [AskCanary(self._reach(now.bad_since))]
        return self._check_limits()

    def canary_answered(self, loss: float, reference: float | None) -> list[Action]:
        """The answer to AskCanary.

        Numerics:
            Sound: loss <= canary_tolerance * reference; for a negative reference the same distance above it. A
            non-finite loss is never sound. A reference that is None or not finite says nothing.

        Args:
            loss: Of the canary, now.
            reference: Of the canary, with the snapshot's weights; None where there is no snapshot.
        """
        now = self._now
        if now.question == "nonfinite":
            if not math.isfinite(loss):
                return [Escalate(f"the canary's loss is {loss} too, with finite weights", reference)]
            now.sound = True
            return self._check_limits()
        if reference is not None and math.isfinite(reference):
            now.sound = is_sound(loss, reference, tolerance=self._policy.canary_tolerance)
            if not now.sound:
                return self._roll_back(now.outlier_since)
        return self._accept_regime() or self._check_limits()

    def rolled_back(self, at_attempt: int) -> None:
        """A snapshot was restored after this attempt: what steps up to it came to no longer matters."""
        self._now.end_streaks()
        self._now.undone = at_attempt
        self._now.since_rollback = 0

    def no_snapshot(self) -> list[Action]:
        """There was no sound snapshot for a Rollback: stop if the weights are lost, else go on skipping."""
        now = self._now
        now.rollbacks -= 1
        return [stop_at_lost_weights(now.bad_since)] if now.question == "weights" else self._check_limits()

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, for JSON."""
        return self._now.as_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._now = RecoveryCounts.from_json(state)

    def _on_overflow(self, seen: SeenStep) -> list[Action]:
        now = self._now
        at_floor = self.floor is None or seen.scale <= self.floor
        now.collapses = now.collapses + 1 if at_floor else 0
        if now.collapses >= self._policy.collapse_after:
            now.question = "collapse"
            return [CheckWeights()]
        # Damaged weights may overflow every gradient. Their loss tells them from a search for the scale.
        is_outlier = seen.loss_score > self._policy.outlier_score and seen.attempt > now.accepted
        return self._on_outlier(seen) if is_outlier else []

    def _on_nonfinite(self) -> list[Action]:
        now = self._now
        now.nonfinite += 1
        if now.nonfinite > 1 and now.nonfinite % RECHECK_EVERY:
            return []
        now.question = "nonfinite"
        return [CheckWeights()]

    def _note_outlier(self, seen: SeenStep) -> list[Action]:
        """A word about an outlier that was trained on, where it is the first after a row of ordinary steps."""
        score = max((s for s in (seen.loss_score, seen.norm_score) if not math.isnan(s)), default=0.0)
        if score <= self._policy.outlier_score:
            return []
        begins = self._now.noted < 0 or seen.attempt - self._now.noted > BURST
        self._now.noted = seen.attempt
        what = f"loss {seen.loss:.4g}" if seen.loss_score == score else f"gradient norm {seen.grad_norm:.4g}"
        return [Warn(f"{what} is out of line (score {score:.1f}); trained on as any other step")] if begins else []

    def _on_outlier(self, seen: SeenStep) -> list[Action]:
        now, policy = self._now, self._policy
        now.outliers += 1
        if now.outliers == 1:
            now.outlier_since = seen.attempt
        now.loss_outliers = now.loss_outliers + 1 if seen.loss_score > policy.outlier_score else 0
        beyond = now.loss_outliers - policy.probe_after
        due = beyond >= 0 and beyond % policy.probe_every == 0
        if not (due or now.outliers >= policy.regime_after):
            return []
        if not (self.can_probe and self.can_roll_back):
            return self._accept_regime()
        now.question = "outlier"
        return [AskCanary(self._reach(now.outlier_since))]

    def _accept_regime(self) -> list[Action]:
        now = self._now
        if now.outliers < self._policy.regime_after:
            return []
        now.outliers = now.loss_outliers = 0
        # Steps that are under way were judged by the old windows; the emptied ones find no outlier for a while.
        now.accepted = now.attempt + self._policy.read_after
        return [AcceptRegime()]

    def _roll_back(self, onset: int) -> list[Action]:
        now, policy = self._now, self._policy
        if not self.can_roll_back:
            return [stop_at_lost_weights(now.bad_since)] if now.question == "weights" else self._check_limits()
        number = now.rollbacks
        if number >= policy.most_rollbacks:
            return [stop_at_spent_rollbacks(number, onset, lost=now.question == "weights")]
        before = self._reach(onset)
        now.rollbacks += 1
        return [Rollback(before, number, number >= policy.lr_cut_from, number == policy.escalate_at)]

    def _reach(self, onset: int) -> int:
        """The attempt that a rollback goes back to, or beyond."""
        return max(0, onset - self._policy.rollback_reach * 2**self._now.rollbacks)

    def _check_limits(self) -> list[Action]:
        """A stop where too many steps were skipped, in a row or of the last ones."""
        now, policy = self._now, self._policy
        if policy.most_bad is not None and now.bad >= policy.most_bad:
            only_outliers = now.outliers == now.bad
            return [stop_at_bad_row(now.bad, now.bad_since, sound=now.sound, only_outliers=only_outliers)]
        applied, window = now.outcomes.count("1"), policy.success_window
        if len(now.outcomes) == window and applied / window < policy.least_success:
            return [stop_at_low_success(applied, window, policy.least_success)]
        return []


def is_sound(loss: float, reference: float, *, tolerance: float) -> bool:
    """Whether the canary's loss is at most this many times the snapshot's; a negative one, the same distance above."""
    if reference < 0:
        tolerance = 2 - tolerance
    return math.isfinite(loss) and (loss <= reference or loss <= tolerance * reference)
