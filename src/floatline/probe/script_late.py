"""LateSteps: steps of a loop on a GPU of which it is not known yet whether they were finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from floatline.probe.aside import Aside
from floatline.probe.events import Event
from floatline.probe.health import find_norms
from floatline.probe.late import LateHealth, LateNumbers
from floatline.probe.script_weights import Weights

# Asking and copying may take this share of a step; else that many steps are asked about together, and no more.
_SHARE, _MOST_STEPS = 0.01, 32


class LateSteps:
    """Asks whether steps were finite, and keeps the weights from before them.

    Every step has numbers of its own, so that the one that failed is known. Where a step is so short that asking and
    copying would slow it down, several are asked about together. The weights are then those from before the first, and
    gradients are looked at in the last one only. What was not finite before that has spoilt the weights, and they are
    looked at then: the step that failed is known by its loss, or else to be among these.

    Attributes:
        num_together: Steps that are asked about together.
        kept_step: The step before which the weights were last copied; -1 where they never were.

    Args:
        late: Brings the numbers to the host.
        on_failure: Called with every step that was not finite, in their order.
    """

    def __init__(self, late: LateNumbers, on_failure: Callable[[Event], None]) -> None:
        self.num_together = 1
        self.kept_step = -1
        self._late = late
        self._on_failure = on_failure
        self._unread: list[tuple[Event, LateHealth]] = []
        self._weights: dict[int, Weights] = {}  # of optimizers, by id
        self._too_large: set[int] = set()  # optimizers whose weights a GPU had no memory for
        self._looked_in, self._knows_all = -1, True  # whether all was known when this step began
        self._spent = 0.0  # seconds since the last question
        self._asked_at, self._asked_in = time.perf_counter(), -1

    @property
    def weights(self) -> Weights | None:
        """The weights from before the steps that are not known yet; None where no copy was made."""
        return Weights.merge(self._weights.values())

    def keep(self, optimizer: Optimizer, step: int, *, detailed: bool) -> None:
        """Copy the weights of an optimizer beside them, unless a step before this one is not known yet.

        What was asked about earlier steps has been read. Where memory did not suffice, it is tried again in detailed
        steps only.
        """
        if step != self._looked_in:  # of several optimizers, the first tells: they are copied together
            self._looked_in, self._knows_all = step, not self._unread
        if not self._knows_all or (id(optimizer) in self._too_large and not detailed):
            return
        began = time.perf_counter()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        fresh = Weights.refresh(self._weights.get(id(optimizer)), parameters)
        if fresh is None:
            self._too_large.add(id(optimizer))
        else:
            self._weights[id(optimizer)], self.kept_step = fresh, step
        self._spent += time.perf_counter() - began

    def put_off(self, event: Event, health: LateHealth) -> None:
        """Take the numbers of a step that is left out."""
        self._unread.append((event, health))

    def add(self, event: Event, health: LateHealth, *, detailed: bool) -> None:
        """Take the numbers of a step; they are asked for with those of other steps, or at once."""
        self._unread.append((event, health))
        if not detailed and self._waits(event.step):
            return
        began = time.perf_counter()
        self._ask()
        self._spent += time.perf_counter() - began
        if event.step > self._asked_in:
            self._set_pace(began, event.step, detailed=detailed)

    def leaves_out(self, step: int) -> bool:
        """Whether a step that begins is not looked at: it comes between the first of several and the last."""
        return bool(self._unread and self._weights) and self._waits(step)

    def _waits(self, step: int) -> bool:
        """Whether a step comes between two that are asked about."""
        return self._asked_in < step < self._asked_in + self.num_together

    def read(self) -> None:
        """Ask about all steps, and wait for the answers."""
        self._ask()
        self._late.read()

    def _set_pace(self, now: float, step: int, *, detailed: bool) -> None:
        """Choose how many steps are asked about together, from the time that this took and that of the steps."""
        usual = (now - self._asked_at) / (step - self._asked_in)
        wanted = math.ceil(self._spent / max(_SHARE * usual, 1e-9))
        if not detailed:  # such steps are slow
            self.num_together = max(1, min(wanted, 2 * self.num_together, _MOST_STEPS))
        self._asked_at, self._asked_in, self._spent = now, step, 0.0

    def _ask(self) -> None:
        unread, self._unread = self._unread, []
        if not all(health.looked for _, health in unread):
            unread[-1][1].add(self._see_weights())
        numbers = [number for _, health in unread for number in health.numbers]
        if not numbers:
            return

        def tell(found: list[float]) -> None:
            for event, health in unread:
                num = len(health.numbers)
                part, found = found[:num], found[num:]
                for loss, number in zip(health.losses, part[num - len(health.losses) :], strict=True):
                    loss.value = number
                if not health.is_fine(part):
                    self._on_failure(event)

        self._late.ask(_pack(numbers), unread[-1][0].step, tell)

    def _see_weights(self) -> list[Tensor]:
        """Numbers that are finite where the weights are."""
        tensors = [tensor for kept in self._weights.values() for tensor in kept.tensors if tensor.numel()]
        with Aside():
            return find_norms(tensors, math.inf)


def _pack(numbers: list[Tensor]) -> Tensor:
    """Single numbers as one vector."""
    with Aside():
        try:
            return torch.stack(numbers)
        except RuntimeError:  # they lie on several devices
            return torch.stack([number.to(numbers[-1].device, torch.float32) for number in numbers])
