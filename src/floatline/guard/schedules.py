"""Learning rates under a guard: schedules that follow applied steps, and cuts that end by themselves."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from floatline.errors import GuardError


class Schedules:
    """The schedulers of a run, advanced once for each applied step, and a cut that lies over all of them.

    On a GPU the host learns late whether a step was applied. It advances at once, as if it had been, and stands
    still once for every skip that it learns of: the number of advances is that of the applied steps, and in a run
    without skips every learning rate is that of a bare loop. On a CPU nothing is late.

    Args:
        optimizer: Whose learning rates are cut.
        late: Whether the host learns late what became of a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, late: bool) -> None:
        self._optimizer = optimizer
        self._late = late
        self._schedulers: list[Any] = []
        self._owed = 0  # advances that were one too many
        self._cut = 1.0
        self._cut_steps = 0  # applied steps until it ends

    def add(self, scheduler: Any) -> None:
        """Advance this scheduler from now on."""
        if getattr(scheduler, "optimizer", None) is not self._optimizer:
            raise GuardError("The scheduler is not that of the guard's optimizer. Make it with the same optimizer.")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise GuardError("ReduceLROnPlateau follows a metric, not steps. Call its step(metric) yourself.")
        self._schedulers.append(scheduler)

    def attempt(self) -> None:
        """A step was sent off: advance, unless an earlier one turned out to be skipped."""
        if not self._late:
            return
        if self._owed:
            self._owed -= 1
            return
        self._advance()

    def learn(self, *, applied: bool) -> None:
        """What became of a step that `attempt` was called for."""
        if not applied:
            self._owed += self._late
            return
        if self._cut_steps:
            self._cut_steps -= 1
            if not self._cut_steps:
                self._set_cut(1.0)
        if not self._late:
            self._advance()

    def cut(self, factor: float, steps: int) -> None:
        """Multiply every learning rate for this many applied steps; cuts on top of each other multiply."""
        self._set_cut(self._cut * factor)
        self._cut_steps = steps

    def _advance(self) -> None:
        if not self._schedulers:
            return
        cut = self._cut
        self._set_cut(1.0)  # schedulers that go on from the present rate must see the uncut one
        for scheduler in self._schedulers:
            scheduler.step()
        self._set_cut(cut)

    def _set_cut(self, cut: float) -> None:
        if cut == self._cut:
            return
        change = cut / self._cut
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(change)
            else:
                group["lr"] *= change
        self._cut = cut

    def state_dict(self) -> dict[str, Any]:
        """Schedulers, debts and cuts; the learning rates themselves are the optimizer's."""
        return {
            "schedulers": [_plain(scheduler.state_dict()) for scheduler in self._schedulers],
            "owed": self._owed,
            "cut": self._cut,
            "cut_steps": self._cut_steps,
            "lrs": [float(group["lr"]) for group in self._optimizer.param_groups],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        saved = cast("list[dict[str, Any]]", state["schedulers"])
        if len(saved) != len(self._schedulers):
            raise GuardError(
                f"The state has {len(saved)} schedulers, and this run {len(self._schedulers)}. "
                "Register the same ones with guard.scheduler first."
            )
        for scheduler, own in zip(self._schedulers, saved, strict=True):
            scheduler.load_state_dict(dict(own))
        for group, lr in zip(self._optimizer.param_groups, state["lrs"], strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._owed, self._cut, self._cut_steps = state["owed"], state["cut"], state["cut_steps"]


def check_rates(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a learning rate that would write NaN or inf into the weights."""
    for i, group in enumerate(optimizer.param_groups):
        lr = group["lr"]
        if isinstance(lr, Tensor):
            continue  # reading it would wait for the device; the judge's survey cannot see it either
        if not math.isfinite(lr) or lr < 0:
            raise GuardError(f"The learning rate of group {i} is {lr!r}. Give a finite number from 0 up.")


def _plain(value: Any) -> Any:
    """A scheduler's state as JSON can hold it: without the functions and objects that it may keep."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in cast("dict[Any, Any]", value).items() if _is_plain(v)}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in cast("list[Any]", value)]
    return float(value) if isinstance(value, Tensor) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return True
    if isinstance(value, list | tuple):
        return all(map(_is_plain, cast("list[Any]", value)))
    return value is None or isinstance(value, bool | int | float | str | Tensor)
