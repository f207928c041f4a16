"""Actions: what the guard is asked to do after it has seen a step, and the words of every stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class CheckWeights:
    """Look whether every weight is finite, and answer with `Recovery.weights_checked`."""


@dataclass(frozen=True, slots=True)
class AskCanary:
    """Take the canary's loss with the weights as they are, and answer with `Recovery.canary_answered`.

    Args:
        before: The reference is the canary's loss of the snapshot that `SnapshotRing.newest_before` gives for this
            attempt: the one a rollback would restore. A newer one may hold the damage already.
    """

    before: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """Restore a snapshot, then call `Recovery.rolled_back`; data and random numbers go on, not back.

    Args:
        before: The snapshot is of this attempt or an earlier one, or the oldest there is.
        number: How many rollbacks came before.
        cut_lr: Cut the learning rate for a while.
        escalate: Raise precision too.
    """

    before: int
    number: int
    cut_lr: bool
    escalate: bool


@dataclass(frozen=True, slots=True)
class AcceptRegime:
    """Empty the windows: what looked like outliers is the new level."""


@dataclass(frozen=True, slots=True)
class Escalate:
    """Replay in FP32, and raise the precision of the block that leaves the format's range.

    Args:
        why: For the ledger.
        reference: Loss of the canary with the snapshot's weights; None where there is no snapshot.
    """

    why: str
    reference: float | None = None


@dataclass(frozen=True, slots=True)
class RaiseScale:
    """Raise the loss scale: gradients of these layers are lost to zero.

    Args:
        layers: Those that lost most.
        factor: What the scale is multiplied by.
    """

    layers: tuple[str, ...]
    factor: float = 2.0


@dataclass(frozen=True, slots=True)
class Warn:
    """Say it, and go on."""

    message: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Say aloud that many steps in a row failed.

    Args:
        num: How many.
        since: The first of them.
        reason: Why the last one was skipped.
    """

    num: int
    since: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Save the state, and end the run.

    Args:
        cause_id: Cause in the catalogue; '' where it is not known.
        message: What happened.
        advice: What to do, where no diagnosis says it better.
    """

    cause_id: str
    message: str
    advice: str = ""


Action: TypeAlias = CheckWeights | AskCanary | Rollback | AcceptRegime | Escalate | RaiseScale | Warn | Alarm | Stop


def stop_at_collapse(num: int, attempt: int, floor: float | None) -> Stop:
    """Gradients were non-finite at the smallest scale, time after time; floor None: the loss is not scaled."""
    seen = f"non-finite {num:,} times in a row, up to step {attempt:,}, with finite loss and weights"
    if floor is None:
        # Without a scale to blame, the replay has to tell a derivative that is infinite from one that does not fit.
        return Stop(
            "",
            f"The gradients were {seen}, and there is no loss scale to lower. Look for a derivative that is infinite, "
            "such as that of sqrt at 0: floatline explain singular-gradient.",
        )
    return Stop(
        "gradient-overflow",
        f"No scale can work: the gradients were {seen}, at the smallest scale, {floor:g}. Take the steep operation in "
        "FP32, or train in BF16: floatline explain gradient-overflow.",
    )


def stop_at_lost_weights(since: int) -> Stop:
    """The weights are non-finite, and the run cannot go back."""
    return Stop(
        "",
        f"The weights are non-finite, and the steps are bad since step {since:,}. There is no snapshot to go back to. "
        "Load a checkpoint, and set snapshot_gib in the policy to go back next time.",
    )


def stop_at_spent_rollbacks(num: int, since: int, *, lost: bool) -> Stop:
    """One more rollback would be more than the policy allows."""
    state = "non-finite" if lost else "damaged"
    return Stop(
        "",
        f"The budget of rollbacks is spent: {num:,} were made, and the weights are {state} again since step {since:,}. "
        "Lower the learning rate or raise precision: floatline explain optimization-divergence says how to tell which.",
    )


def stop_at_bad_row(num: int, since: int, *, sound: bool, only_outliers: bool) -> Stop:
    """Too many steps in a row were skipped; sound: the canary says that the weights are not to blame."""
    advice = (
        "The canary's loss is sound: look at the batches."
        if sound
        else "The ledger has the reason of each: look at their batches, or raise most_bad in the policy."
    )
    cause = "bad-input-data" if sound and only_outliers else ""
    return Stop(cause, f"{num:,} steps in a row were skipped, since step {since:,}.", advice)


def stop_at_low_success(applied: int, window: int, least: float) -> Stop:
    """Too few of the last steps were applied."""
    return Stop(
        "",
        f"Only {applied:,} of the last {window:,} steps were applied, and least_success is {least:g}.",
        "The ledger has the reason of each skip: fix the most frequent one, or lower least_success in the policy.",
    )
