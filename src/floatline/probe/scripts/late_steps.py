"""LateSteps: steps of a loop on a GPU of which it is not known yet whether they were finite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from floatline.probe.scripts.weight_copies import Weights
from floatline.probe.watch.events import StepEvent
from floatline.probe.watch.health import LateHealth, LateNumbers
from floatline.probe.watch.patches import Aside


class LateSteps:
    """Asks of every step whether it was finite, and keeps the weights from before it until the answer is there.

    Attributes:
        kept_step: The step before which the weights were last copied; -1 where they never were.

    Args:
        late: Brings the numbers to the host.
        on_failure: Called with every step that was not finite, in their order.
    """

    def __init__(self, late: LateNumbers, on_failure: Callable[[StepEvent], None]) -> None:
        self.kept_step = -1
        self._late = late
        self._on_failure = on_failure
        self._weights: dict[int, Weights] = {}  # of optimizers, by id
        self._too_large: set[int] = set()  # optimizers whose weights a GPU had no memory for

    @property
    def weights(self) -> Weights | None:
        """The weights from before the step that is not known yet; None where no copy was made."""
        return Weights.merge(self._weights.values())

    def keep(self, optimizer: Optimizer, step: int, *, detailed: bool) -> None:
        """Copy the weights of an optimizer beside them; the answers about earlier steps have been read.

        Where memory did not suffice, it is tried again in detailed steps only.
        """
        if id(optimizer) in self._too_large and not detailed:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        fresh = Weights.refresh(self._weights.get(id(optimizer)), parameters)
        if fresh is None:
            self._too_large.add(id(optimizer))
        else:
            self._weights[id(optimizer)], self.kept_step = fresh, step

    def ask(self, event: StepEvent, health: LateHealth) -> None:
        """Send the numbers of a step on their way."""
        if not health.numbers:
            return

        def tell(found: list[float]) -> None:
            for loss, number in zip(health.losses, found[len(found) - len(health.losses) :], strict=True):
                loss.value = number
            if not health.is_fine(found):
                self._on_failure(event)

        self._late.ask(_pack(health.numbers), event.step, tell)


def _pack(numbers: list[Tensor]) -> Tensor:
    """Single numbers as one vector."""
    with Aside():
        try:
            return torch.stack(numbers)
        except RuntimeError:  # they lie on several devices
            return torch.stack([number.to(numbers[-1].device, torch.float32) for number in numbers])
