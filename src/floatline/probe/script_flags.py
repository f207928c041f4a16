"""LateFlags: an answer from a GPU, read one step later, so that nothing waits for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from floatline.probe.aside import Aside
from floatline.probe.events import Event


class LateFlags:
    """Whether the gradients of a step were finite: a number from the device is finite then.

    It is copied to the host behind the step's own work. When the next optimizer step asks, the device is
    already in that step, so that reading waits for nothing that is still to do.
    """

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._asked: Event | None = None

    @property
    def waiting(self) -> bool:
        """Whether an answer is still to be read."""
        return self._asked is not None

    def ask(self, health: Tensor, event: Event) -> None:
        """Send a number on its way."""
        with Aside():
            if self._host is None:
                self._host = torch.empty((), dtype=torch.float64, pin_memory=True)
                self._arrived = torch.cuda.Event()
            self._host.copy_(health, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
        self._asked = event

    def read(self) -> Event | None:
        """The event whose gradients were not finite; None where they were, or nothing was asked."""
        asked, self._asked = self._asked, None
        if asked is None or self._host is None or self._arrived is None:
            return None
        self._arrived.synchronize()
        with Aside():
            return None if math.isfinite(self._host.item()) else asked
