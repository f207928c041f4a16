"""Guarding: what guards the optimizers of an Accelerator, what is put around its models, and how it ends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from floatline.guard.diary import is_first_process, say
from floatline.guard.failures import OnFailure
from floatline.guard.guard import Guard
from floatline.guard.policy import Policy, resolve_policy
from floatline.integrations.accelerate.scaler import GuardScaler
from floatline.integrations.half_arithmetic import ForwardHooks, keep_autocast_lists
from floatline.ledger.parts import list_parts
from floatline.plans import Plan


@dataclass
class Guarding:
    """How the optimizers of an Accelerator are guarded, and what was put in place for it.

    Args:
        plan: The precision.
        policy: When to skip, go back and stop.
        folder: Run folder of the ledger; None keeps the account in memory only.
        resume: Go on with the ledger that the folder holds.
        layers_every: Record the gradient norm of each parameter every N steps; 0 never.
        on_failure: Called with each failed step.
        scaler: Has the guards.
        bare: The loop is the user's: weights of prepared models are cast, and CUDA's lists are in force, until `close`.
            A framework's loop does both itself, and starts again in a folder that holds a ledger.
        steps: Steps that the run will have, where that is known.
        open: Whether ledgers are being written.
        hooks: Around the forward passes of prepared models.
    """

    plan: Plan
    policy: Policy
    folder: Path | None
    resume: bool
    layers_every: int
    scaler: GuardScaler
    on_failure: OnFailure | None = None
    bare: bool = True
    steps: int | None = None
    open: bool = False
    hooks: dict[nn.Module, ForwardHooks] = field(default_factory=dict[nn.Module, ForwardHooks])
    _leave_lists: Callable[[], Any] | None = None

    @property
    def guards(self) -> list[Guard]:
        """One for each optimizer, in their order."""
        return self.scaler.guards

    def make_guard(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Guard:
        """Guard one more optimizer; the first writes its ledger to the folder, others to folders inside."""
        folder, number = self.folder, len(self.guards)
        if folder is not None and number:
            folder = folder / f"optimizer-{number}"
        resume = self.resume and folder is not None
        if folder is not None and not self.bare and is_first_process(None):
            resume = _make_room(folder, resume=resume)
        guard = Guard(
            model,
            optimizer,
            plan=self.plan,
            clip_norm=math.inf if self.plan.clip is None else None,
            policy=self.policy,
            folder=folder,
            resume=resume,
            record_layers_every=self.layers_every,
            steps=self.steps,
            on_failure=self.on_failure,
        )
        self.scaler.add(guard)
        self.open = True
        if is_first_process(None):
            say(guard.manifest)
        return guard

    def begin(self, device: torch.device) -> None:
        """On a CPU, take CUDA's autocast lists, until `close`."""
        if self.bare and self._leave_lists is None:
            self._leave_lists = keep_autocast_lists(self, device, self.plan)

    def summary(self) -> str:
        """What happened, in five lines for each optimizer; waits for the device."""
        return "\n".join(guard.summary() for guard in self.guards)

    def close_ledgers(self) -> None:
        """Read what is outstanding, and close the ledgers; models still compute as the plan says."""
        self.open = False
        with contextlib.ExitStack() as stack:
            for guard in self.guards:
                stack.callback(guard.close_ledger)
                stack.callback(guard.drain)

    def close(self) -> None:
        """Read what is outstanding, close the ledgers, and take everything away that was put around the models."""
        with contextlib.ExitStack() as stack:
            if self._leave_lists is not None:
                stack.callback(self._leave_lists)
            for hooks in self.hooks.values():
                stack.callback(hooks.remove)
            for guard in self.guards:
                stack.callback(guard.close)
        self.hooks, self._leave_lists, self.open = {}, None, False


def choose_policy(policy: Policy | str | None, plan: Plan) -> Policy:
    """The policy, without what a framework's schedule undoes.

    Args:
        policy: What the user gave.
        plan: Its name may be a preset's.
    """
    chosen = resolve_policy(policy, plan_name=plan.name)
    # The framework's schedule sets the learning rate in every step: a cut would not last.
    return replace(chosen, lr_cut_from=chosen.most_rollbacks + 1)


def _make_room(folder: Path, *, resume: bool) -> bool:
    """Whether there is a ledger to go on with; one of an earlier run is put aside where this run is a new one."""
    parts = list_parts(folder) if folder.is_dir() else []
    if resume or not parts:
        return bool(parts)
    number = 1 + sum(1 for _ in folder.glob("earlier-ledger-*"))
    aside = folder / f"earlier-ledger-{number}"
    aside.mkdir()
    for part in parts:
        part.rename(aside / part.name)
    return False
