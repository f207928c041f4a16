"""Watching: what a guarded run is watched with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from floatline.guard.failed_steps import OnFailure
from floatline.guard.policy import Policy, resolve_policy
from floatline.plan import Plan

# A Trainer that counts applied steps alone must not wait for ever for steps that all fail.
_MOST_BAD = 200


@dataclass
class Watching:
    """What a run is watched with.

    Args:
        policy: When to skip, go back and stop; None is the plan's.
        folder: Run folder of the ledger; None keeps the account in memory only.
        resume: Go on with the ledger that the folder holds.
        layers_every: Record the gradient norm of each parameter every N steps; 0 never.
        on_failure: Called with each failed step.
        outliers: Skip steps whose loss or norm is far out of line, where no policy is given.
        steps: Steps that the run will have, where that is known; for the ledger's header.
    """

    policy: Policy | str | None = None
    folder: Path | None = None
    resume: bool = False
    layers_every: int = 0
    on_failure: OnFailure | None = None
    outliers: bool = False
    steps: int | None = None

    def resolve(self, plan: Plan, *, alone: bool = True) -> Policy:
        """The policy that was given, or the plan's, with an end to a row of bad steps.

        Args:
            plan: The plan.
            alone: There is one optimizer. With more than one, none goes back: it would take the weights of the others
                along, and leave their states.
        """
        policy = resolve_policy(self.policy, plan_name=plan.name)
        if not alone:
            policy = replace(policy, snapshot_gib=0.0)
        if self.policy is not None:
            return policy
        score = policy.outlier_score if self.outliers else math.inf
        return replace(policy, outlier_score=score, most_bad=policy.most_bad or _MOST_BAD)
