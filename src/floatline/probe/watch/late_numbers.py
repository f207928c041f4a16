"""LateNumbers: numbers from a GPU, read some time after they were asked for, so that nothing waits for them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from floatline.probe.watch.patches import Aside

# Numbers that fit into the memory of an answer, at least: more gradients than most models have.
_USUAL = 512
# Such memory that is kept for later.
_MOST_FREE = 8


@dataclass(slots=True)
class _NumberSlot:
    """Memory on the host, the part of it that was last asked for, and when it has been filled."""

    host: Tensor
    arrived: torch.cuda.Event
    part: Tensor


@dataclass(slots=True)
class _Asked:
    """A question: its step, where the answer comes to, and who is told."""

    step: int
    host: Tensor
    slot: _NumberSlot | None
    then: Callable[[list[float]], None]


@dataclass(slots=True, eq=False)
class ScaledLoss:
    """A loss that goes backward with a loss scale in it, without that scale; on its device until somebody reads it.

    Args:
        value: The loss with its scale.
        factor: The scale.
    """

    value: Tensor | float
    factor: float

    def __float__(self) -> float:
        return float(self.value) / self.factor


@dataclass(slots=True)
class LateHealth:
    """Numbers of a step, still on their device, that tell whether it was finite.

    Args:
        numbers: Finite where gradients and losses are, the losses last.
        losses: Those losses.
        flagged: Whether the first is a flag instead: 0 where all gradients are finite.
    """

    numbers: list[Tensor]
    losses: list[ScaledLoss] = field(default_factory=list[ScaledLoss])
    flagged: bool = False

    def is_fine(self, found: list[float]) -> bool:
        """Whether the step was finite, by what the numbers turned out to be."""
        return are_finite(found) and not (self.flagged and found[0])


class LateNumbers:
    """Numbers of a device, copied to the host behind the work that is queued there.

    A step later the device has long passed that place: reading then waits for nothing that is still to do. Numbers that
    are on the host already are late as well, so that a loop without a GPU can be treated alike.
    """

    def __init__(self) -> None:
        self._asked: deque[_Asked] = deque()
        self._free: list[_NumberSlot] = []

    def ask(self, numbers: Tensor, step: int, then: Callable[[list[float]], None]) -> None:
        """Send numbers on their way.

        Args:
            numbers: A vector, or one number.
            step: The step that they belong to.
            then: Called with them when they are read.
        """
        with Aside():
            if numbers.ndim != 1:
                numbers = numbers.flatten()
            if numbers.device.type != "cuda":
                self._asked.append(_Asked(step, numbers.detach().clone(), None, then))
                return
            slot = self._take(len(numbers))
            slot.part.copy_(numbers, non_blocking=True)
            slot.arrived.record(torch.cuda.current_stream(numbers.device))  # pyright: ignore[reportUnknownMemberType]
        self._asked.append(_Asked(step, slot.part, slot, then))

    def _take(self, size: int) -> _NumberSlot:
        place = next((i for i, free in enumerate(self._free) if len(free.host) >= size), None)
        if place is None:
            host = torch.empty(max(size, _USUAL), dtype=torch.float32, device="cpu", pin_memory=True)
            return _NumberSlot(host, torch.cuda.Event(), host[:size])
        slot = self._free.pop(place)
        if len(slot.part) != size:
            slot.part = slot.host[:size]
        return slot

    def read(self, *, before: int | None = None) -> None:
        """Tell those who asked in steps before one; None: everybody. Waits for what has not arrived yet."""
        while self._asked and (before is None or self._asked[0].step < before):
            asked = self._asked.popleft()
            with Aside():
                if asked.slot is not None:
                    asked.slot.arrived.synchronize()
                numbers = cast("list[float]", asked.host.tolist())
            if asked.slot is not None:
                self._free.append(asked.slot)
                del self._free[:-_MOST_FREE]
            asked.then(numbers)


def is_far(tensor: Tensor) -> bool:
    """Whether a tensor lies on a device that works on by itself: reading it would wait."""
    return not tensor.is_cpu


def are_finite(numbers: list[float]) -> bool:
    """Whether no number is inf or NaN."""
    return math.isfinite(sum(numbers)) or all(map(math.isfinite, numbers))
