"""Policy: every number the guard acts on, as data, with the presets that have a name."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from floatline.errors import GuardError, suggest


@dataclass(frozen=True)
class Policy:
    """When a step is skipped, when the run goes back, when it stops.

    Args:
        outlier_score: A loss or gradient norm with a higher score is an outlier; inf: none is. It is noted.
        skip_outliers: Skip outliers, instead of training on them. One that has a sample in common with an outlier that
            was skipped before is trained on, and so is a level that persists.
        outlier_warmup: Accepted steps before the score is used.
        skip_norm_above: A gradient norm above this number is skipped, too; inf never. A folk remedy: see `remedies`.
        warn_norm_above: A gradient norm that rises above this number is told, and trained on: the first time on stderr,
            each time in the ledger; inf never.
        score_floor: Smallest scale of the score: ln x must move by score_floor * outlier_score at least.
        probe_after: Loss outliers in a row before the canary batch is asked.
        probe_every: Outliers between two questions after that.
        canary_tolerance: The weights are sound while the canary's loss is at most this many times the snapshot's.
        regime_after: Outliers in a row, with sound weights, after which the new level is accepted as normal.
        snapshot_gib: Host memory for snapshots; 0 keeps none, and the run cannot go back.
        snapshots: Snapshots kept.
        snapshot_every: Steps between two; the distance grows with the run.
        rollback_reach: The k-th rollback goes back to at least reach * 2^k steps before the trouble began.
        lr_cut_from: Rollbacks (counted from 0) from which the learning rate is cut.
        lr_cut: What it is multiplied by.
        lr_cut_steps: Applied steps for which it stays cut.
        escalate_at: The rollback that also raises precision.
        most_rollbacks: One more stops the run.
        forget_rollbacks: Applied steps after which rollbacks are forgotten.
        retry_overflow: Times `step` runs an overflowed batch again at the lower scale; costs a host read a step.
        underflow_warn: Share of gradient elements lost to zero that is worth a warning.
        underflow_act: Share at which the scale is raised.
        underflow_every: Steps between two counts; 0 never counts.
        collapse_after: Overflows in a row at the smallest scale after which no scale can work.
        warn_after: Failed steps in a row after which a line on stderr says so.
        most_bad: Skipped steps in a row that stop the run; None never.
        least_success: Share of applied steps, over the last success_window, below which the run stops.
        success_window: Steps the share is taken over.
        read_after: Steps after which the host reads what a GPU decided.
    """

    outlier_score: float = 6.0
    skip_outliers: bool = False
    outlier_warmup: int = 32
    skip_norm_above: float = math.inf
    warn_norm_above: float = math.inf
    score_floor: float = 0.01
    probe_after: int = 3
    probe_every: int = 4
    canary_tolerance: float = 1.1
    regime_after: int = 50
    snapshot_gib: float = 0.0
    snapshots: int = 8
    snapshot_every: int = 20
    rollback_reach: int = 20
    lr_cut_from: int = 2
    lr_cut: float = 0.5
    lr_cut_steps: int = 100
    escalate_at: int = 3
    most_rollbacks: int = 5
    forget_rollbacks: int = 1000
    retry_overflow: int = 0
    underflow_warn: float = 0.01
    underflow_act: float = 0.05
    underflow_every: int = 100
    collapse_after: int = 20
    warn_after: int = 10
    most_bad: int | None = 200
    least_success: float = 0.0
    success_window: int = 500
    read_after: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            lowest, highest = _LIMITS.get(field.name, (0, math.inf))
            if field.name == "most_bad" and value is None:
                continue
            if field.type == "bool":
                if not isinstance(value, bool):
                    raise GuardError(f"{field.name} is {value!r}. Give True or False.")
                continue
            whole = field.type in ("int", "int | None")
            good = isinstance(value, int) if whole else isinstance(value, int | float)
            if isinstance(value, bool) or not good or not lowest <= value <= highest:
                kind = "a whole number" if whole else "a number"
                span = f"from {lowest:g}" + (f" to {highest:g}" if math.isfinite(highest) else " up")
                raise GuardError(f"{field.name} is {value!r}. Give {kind} {span}.")


_LIMITS: dict[str, tuple[float, float]] = {
    "outlier_score": (1, math.inf),
    "outlier_warmup": (4, 128),
    "skip_norm_above": (1e-6, math.inf),
    "warn_norm_above": (1e-6, math.inf),
    "score_floor": (1e-6, math.inf),
    "probe_after": (1, math.inf),
    "probe_every": (1, math.inf),
    "canary_tolerance": (1, math.inf),
    "regime_after": (1, math.inf),
    "snapshots": (1, math.inf),
    "snapshot_every": (1, math.inf),
    "rollback_reach": (1, math.inf),
    "lr_cut": (1e-6, 1),
    "lr_cut_steps": (1, math.inf),
    "forget_rollbacks": (1, math.inf),
    "underflow_warn": (0, 1),
    "underflow_act": (0, 1),
    "collapse_after": (1, math.inf),
    "warn_after": (1, math.inf),
    "most_bad": (1, math.inf),
    "least_success": (0, 1),
    "success_window": (1, math.inf),
    "read_after": (0, 64),
}

DEFAULT = Policy()
POLICIES: dict[str, Policy] = {
    # Unattended runs: outliers are skipped, snapshots are kept, and a run that loses most of its work is stopped.
    "safe": replace(DEFAULT, skip_outliers=True, snapshot_gib=8.0, least_success=0.5),
    # What costs nothing, and a stop when most of the work is lost.
    "balanced": replace(DEFAULT, least_success=0.5),
    # A short, expensive fine-tuning: retry what overflowed, stop after ten bad batches in a row.
    "ultra-conservative": replace(DEFAULT, snapshot_gib=8.0, retry_overflow=3, most_bad=10, least_success=0.9),
}


def resolve_policy(policy: Policy | str | None, *, plan_name: str) -> Policy:
    """The policy itself, the preset of that name, or the one that belongs to the plan.

    Args:
        policy: What the user gave; None takes the preset that has the plan's name, or the default.
        plan_name: Name of the plan.
    """
    if isinstance(policy, Policy):
        return policy
    if policy is None:
        return POLICIES.get(plan_name, DEFAULT)
    if policy not in POLICIES:
        raise GuardError(f"Policy {policy!r} is not known. {suggest(str(policy), POLICIES)}")
    return POLICIES[policy]
