"""Learning-rate schedulers that someone else advances, and that stand still for steps that were skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from floatline.guard.schedules import Schedules


@dataclass
class _Gate:
    """A scheduler under guard.

    Args:
        scheduler: The scheduler.
        kind: Its class.
        every: Steps that one call stands for; None: a call stands for the one step since the last call, if it was one.
        debt: Skipped steps that calls have still to leave out.
        since: Steps since the last call.
    """

    scheduler: Any
    kind: type[Any]
    every: int | None
    debt: int = 0
    since: int = 0

    def stands_still(self) -> bool:
        """Whether the call that is being made is that of a skipped step; counts it."""
        since, self.since = self.since, 0
        if self.every is None and since != 1:
            self.debt = 0  # a call for a whole epoch, or for no step at all: not ours to leave out
            return False
        cost = self.every or 1
        if self.debt < cost:
            return False
        self.debt -= cost
        return True


class CalledSchedules(Schedules):
    """The schedulers of an optimizer that a framework or the user advances, by calling their `step`.

    A call is left out for each step that was skipped. On a GPU the host learns of a skip some steps later, and leaves
    out a call then: the number of advances is that of the applied steps all the same. Calls with an argument (a metric,
    an epoch) pass.

    Args:
        optimizer: Whose learning rates they set.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, late=True)
        self._gates: list[_Gate] = []

    def guard(self, scheduler: Any, *, every: int | None) -> None:
        """Leave out calls of this scheduler's `step` from here on.

        Args:
            scheduler: Its class gets a subclass of the same name: its `__dict__` goes into checkpoints, and stays as
                it is.
            every: Applied steps that one call stands for; None where that is not known.
        """
        self.add(scheduler)
        gate = _Gate(scheduler, scheduler.__class__, every)
        self._gates.append(gate)

        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs:
                return gate.kind.step(scheduler, *args, **kwargs)
            if gate.stands_still():
                return None
            cut = self._cut
            self._set_cut(1.0)  # schedulers that go on from the present rate must see the uncut one
            try:
                return gate.kind.step(scheduler)
            finally:
                self._set_cut(cut)

        body = {"step": step, "__module__": gate.kind.__module__, "__qualname__": gate.kind.__qualname__}
        scheduler.__class__ = type(gate.kind.__name__, (gate.kind,), body)

    def release(self) -> None:
        """Give every scheduler its class back."""
        for gate in self._gates:
            gate.scheduler.__class__ = gate.kind
        self._gates = []

    def attempt(self) -> None:
        """A step was sent off; whoever advances the schedulers does so by himself."""
        for gate in self._gates:
            gate.since += 1

    def learn(self, *, applied: bool) -> None:
        """What became of a step."""
        super().learn(applied=applied)
        for gate in self._gates:
            gate.debt += not applied

    def debts(self) -> dict[str, Any]:
        """What a checkpoint needs beside the schedulers and learning rates that the framework saves."""
        return {"debts": [gate.debt for gate in self._gates], "cut": self._cut, "cut_steps": self._cut_steps}

    def load_debts(self, state: dict[str, Any]) -> None:
        """Take what `debts` gave."""
        for gate, debt in zip(self._gates, state["debts"], strict=False):
            gate.debt = int(debt)
        self._cut, self._cut_steps = float(state["cut"]), int(state["cut_steps"])
