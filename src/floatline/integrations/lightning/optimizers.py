"""Optimizers of a framework's run: exchanged for 16-bit weights, their gradients, and their schedulers."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from floatline import optim
from floatline.errors import GuardError
from floatline.guard.schedules import Schedules
from floatline.numerics import foreach
from floatline.optim import mesh
from floatline.plans import Plan


def exchange(optimizer: Any, plan: Plan) -> torch.optim.Optimizer:
    """The optimizer, or one of `floatline.optim` of the same kind and groups where the plan has 16-bit weights."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GuardError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer. Give one in configure_optimizers."
        )
    if plan.weights == "fp32":
        return optimizer
    own = isinstance(optimizer, optim.Optimizer)
    if own and plan.update in (None, optimizer.update) and plan.states in (None, optimizer.states):
        return optimizer
    return optim.convert(optimizer, update=plan.update or "exact", states=plan.states)


def follow(scheduler: Any, *, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Let a scheduler, and those inside of it, set the learning rates of another optimizer with the same groups."""
    for one in _nested(scheduler):
        if getattr(one, "optimizer", None) is old:
            one.optimizer = new


def count_calls(optimizer: torch.optim.Optimizer) -> None:
    """Let torch see that the optimizer's step is called: schedulers made for another one would warn that it is not."""
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _nested(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in cast("list[Any]", getattr(scheduler, "_schedulers", [])):
        yield from _nested(inner)


@torch.no_grad()
def multiply_gradients(optimizer: torch.optim.Optimizer, factor: Tensor) -> None:
    """Multiply every gradient in place, in its own format; the host waits for nothing."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in _grads(optimizer):
        kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in kinds.items():
        foreach.mul_(grads, factor.to(device))


def _grads(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                grad = mesh.local_part(param.grad)
                yield grad._values() if grad.is_sparse else grad


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
        """Count a step that was sent off; the framework or the user advances the schedulers."""
        for gate in self._gates:
            gate.since += 1

    def learn(self, *, applied: bool) -> None:
        """Note whether a step was applied; a skipped one makes the next call owed."""
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
