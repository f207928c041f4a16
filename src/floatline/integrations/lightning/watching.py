"""Watching: what a guarded run is watched with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from floatline.guard.failures import OnFailure
from floatline.guard.policy import Policy, resolve_policy
from floatline.plans import Plan

# A Trainer that counts applied steps alone must not wait for ever for steps that all fail.


@dataclass
class Watching:
    """What a run is watched with.

    Args:
        policy: When to skip, go back and stop; None is the plan's.
        folder: Run folder of the ledger; None keeps the account in memory only.
        resume: Go on with the ledger that the folder holds.
        layers_every: Record the gradient norm of each parameter every N steps; 0 never.
        on_failure: Called with each failed step.
        steps: Steps that the run will have, where that is known; for the ledger's header.
    """

    policy: Policy | str | None = None
    folder: Path | None = None
    resume: bool = False
    layers_every: int = 0
    on_failure: OnFailure | None = None
    steps: int | None = None

    def resolve(self, plan: Plan, *, alone: bool = True) -> Policy:
        """The policy that was given, or the plan's.

        Args:
            plan: The plan.
            alone: There is one optimizer. With more than one, none goes back: it would take the weights of the others
                along, and leave their states.
        """
        policy = resolve_policy(self.policy, plan_name=plan.name)
        return policy if alone else replace(policy, snapshot_gib=0.0)
