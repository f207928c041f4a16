"""Run: what a guarded run is made of, in one place; and what its guard shows of it and lets others set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from floatline.errors import GuardError
from floatline.guard.averages import Average
from floatline.guard.diary import Diary
from floatline.guard.policy import Policy
from floatline.guard.recovery.recovery import Recovery
from floatline.guard.recovery.snapshots import SnapshotRing
from floatline.guard.schedules import Schedules
from floatline.guard.step.judge import Judge
from floatline.guard.step.samples import Samples
from floatline.ledger.account import Accounts, Listener
from floatline.ledger.ledger import Ledger
from floatline.plans import Plan
from floatline.precision.applied_plan import AppliedPlan
from floatline.precision.islands import Islands, Outputs
from floatline.precision.placements import describe_run
from floatline.precision.wrappers import unwrap

ListenerT = TypeVar("ListenerT", bound=Listener)


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


class GuardedRun:
    """What a guard shows of its run, and what may be set between two steps."""

    run: Run

    @property
    def plan(self) -> Plan:
        """The precision the run computes in now."""
        return self.run.plan

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function that was given, computed as the plan says."""
        return self.run.applied.loss_fn

    def describe_plan(self) -> str:
        """Where each module of the model ended up, and why; as a table."""
        return describe_run(unwrap(self.run.model), self.plan, self.run.islands)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose steps are guarded."""
        return self.run.optimizer

    @property
    def policy(self) -> Policy:
        """When steps are skipped, when the run goes back, when it stops."""
        return self.run.policy

    @property
    def model(self) -> nn.Module:
        """The model, wrapped as it was given."""
        return self.run.model

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        return self.run.device

    @property
    def epoch(self) -> int | None:
        """The epoch that is counted; None where the caller counts none."""
        return self.run.epoch

    @property
    def scale(self) -> Tensor:
        """The loss scale of the next step, on the device: what a loss is multiplied by that goes backward by itself."""
        return self.run.judge.scale

    @property
    def accounts(self) -> Accounts:
        """Totals of all steps that have been read so far, in all and per epoch."""
        return self.run.diary.accounts

    def note(self, message: str, **values: float) -> None:
        """Write a note into the ledger."""
        self.run.diary.note("note", message, **values)

    def note_evaluation(self, message: str = "", /, **metrics: float) -> None:
        """Write the metrics of an evaluation into the ledger."""
        self.run.diary.note("evaluation", message, **metrics)

    @property
    def attempts(self) -> int:
        """Steps so far, applied or not."""
        return self.run.attempts

    @property
    def ledger(self) -> Ledger | None:
        """The ledger, where there is a run folder and this process writes it."""
        return self.run.diary.ledger

    def set_scale(self, scale: float) -> None:
        """Take another loss scale from the next step on, within the plan's limits."""
        self.run.judge.set_scale(scale)

    def share_scale(self, scale: Tensor, good_steps: Tensor, overflows: Tensor) -> None:
        """Move these tensors with the scale from here on: several optimizers of one loss have one scale.

        Args:
            scale: The loss scale.
            good_steps: Steps since it moved last.
            overflows: Overflows in a row.
        """
        judge = self.run.judge
        judge.scale, judge.good_steps, judge.overflows = scale, good_steps, overflows

    @property
    def shared_scale(self) -> tuple[Tensor, Tensor, Tensor]:
        """What another guard's `share_scale` takes."""
        judge = self.run.judge
        return judge.scale, judge.good_steps, judge.overflows

    def scheduler(self, scheduler: Any) -> Any:
        """Let the guard advance this scheduler, on applied steps only; gives it back.

        Args:
            scheduler: One of torch.optim.lr_scheduler, made with the guard's optimizer. Do not call its step().
        """
        self.run.schedules.add(scheduler)
        return scheduler

    def attach(self, listener: ListenerT) -> ListenerT:
        """Let a logger hear of every step and event, once their numbers are on the host; gives it back.

        Args:
            listener: Such as `floatline.integrations.loggers.TensorBoardLogger`; closed with the guard. On several
                processes only that of process 0 is used.
        """
        self.run.diary.attach(listener)
        return listener

    def averaged(self, decay: float) -> Average:
        """Keep an exponential average of the weights in float32, moved by applied steps only.

        Args:
            decay: What the average keeps in each step, such as 0.999.
        """
        self.run.average = Average(unwrap(self.run.model), self.run.optimizer, decay)
        return self.run.average

    def begin_epoch(self, number: int) -> None:
        """Count batches of this epoch from here on; records and stops name epoch and batch."""
        self.count_from(number, 0)

    def count_from(self, epoch: int | None, batch: int | None) -> None:
        """Let the next step be of this batch of this epoch; None where the caller does not count."""
        self.run.epoch, self.run.batch = epoch, None if batch is None else batch - 1

    def load_scaler(self, state: dict[str, Any]) -> None:
        """Take the scale of a torch.amp.GradScaler, or of a LossScaler, from its state_dict."""
        if self.plan.scaling is None:
            raise GuardError(f"Plan '{self.plan.name}' does not scale the loss. Use a plan with fp16 compute.")
        if "scale" not in state:
            raise GuardError("The state has no 'scale'. Give the state_dict of an enabled torch.amp.GradScaler.")
        self.run.judge.set_scale(float(state["scale"]))
        self.run.judge.good_steps.fill_(float(state.get("_growth_tracker", 0)))

    def flush(self) -> None:
        """Wait until every step that was read is in the ledger on the disk."""
        self.run.diary.flush()

    def close_ledger(self) -> None:
        """Close the ledger alone; the model still computes as the plan says."""
        self.run.diary.close()
