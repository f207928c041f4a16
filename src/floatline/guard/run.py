"""Run: what a guarded run is made of, in one place; the guard drives it, rescue repairs it, checkpoints save it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from floatline.guard.averages import Average
from floatline.guard.diary import Diary
from floatline.guard.policy import Policy
from floatline.guard.recovery.recovery import Recovery
from floatline.guard.recovery.snapshots import SnapshotRing
from floatline.guard.schedules import Schedules
from floatline.guard.step.judge import Judge
from floatline.guard.step.samples import Samples
from floatline.plans import Plan
from floatline.precision.applied_plan import AppliedPlan
from floatline.precision.islands import Islands, Outputs


@dataclass
class Run:
    """The parts of a guarded run.

    Args:
        model: The model, wrapped or not.
        optimizer: Its optimizer.
        device: Where the trained parameters are.
        plan: The precision it computes in now; escalation changes it.
        policy: The numbers it is guarded by.
        judge: Scale and windows.
        schedules: Learning rates.
        applied: What the plan keeps in FP32 and rewrites.
        diary: Accounts and ledger.
        recovery: What trouble was seen, and what was done about it.
        ring: Snapshots.
        average: Average of the weights, where one is kept.
        samples: Those of skipped outliers, where outliers are skipped.
        diagnoses: What was found out about steps that failed, each with its step.
        attempts: Steps so far.
        epoch: Epoch, where the caller counts them.
        batch: Batch within the epoch.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    plan: Plan
    policy: Policy
    judge: Judge
    schedules: Schedules
    applied: AppliedPlan
    diary: Diary
    recovery: Recovery
    ring: SnapshotRing
    average: Average | None = None
    samples: Samples | None = None
    diagnoses: list[str] = field(default_factory=list[str])
    attempts: int = 0
    epoch: int | None = None
    batch: int | None = None

    @property
    def islands(self) -> Islands:
        """Modules that compute in FP32."""
        return self.applied.islands

    def take_plan(self, plan: Plan, islands: Mapping[str, Outputs | None]) -> None:
        """Compute as this plan says from here on, with these modules in FP32; weights keep their dtypes.

        Args:
            plan: Its compute dtype and scaling are taken.
            islands: Modules that compute in FP32, and what becomes of their outputs; '' is the whole model.
        """
        self.plan = plan
        self.judge.scaling = plan.scaling
        self.recovery.floor = None if plan.scaling is None else plan.scaling.floor
        if plan.scaling is None:
            self.judge.scale.fill_(1.0)
        for name, outputs in islands.items():
            if name not in self.islands.names:
                self.islands.add(name, outputs=outputs)
