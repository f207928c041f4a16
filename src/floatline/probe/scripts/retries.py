"""Retries: later steps are run on the weights from before a failed one, until one fails by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

from torch import Tensor

from floatline.probe.scripts.weight_copies import Weights, all_finite

# How many steps are tried to see a failure come again: some batches only bring it about.
ATTEMPTS = 8


class Retries:
    """Keeps the weights from before a failure, lends them to a step, and gives the script its own ones back.

    Attributes:
        before: The weights with which a step failed; None where none did, or they were not finite.
        step: The step that failed; -1 where none did.
        num: How many steps were tried.
        runs: Whether the step under way is one of them.
    """

    def __init__(self) -> None:
        self.before: Weights | None = None
        self.step = -1
        self.num = 0
        self.runs = False
        self._healthy: Weights | None = None
        self._own: Weights | None = None

    @property
    def pending(self) -> bool:
        """Whether a failure waits to be seen again."""
        return self._healthy is not None

    @property
    def has_more(self) -> bool:
        """Whether another step may be tried after this one."""
        return self.num < ATTEMPTS

    def keep(self, weights: Weights | None, step: int) -> bool:
        """Keep the weights with which a step failed; whether they are finite. If not, nothing is left to try it on."""
        if weights is None or not all_finite(weights.copies):
            self.num = ATTEMPTS
            return False
        self._healthy, self.before, self.step = weights, weights, step
        return True

    def put_on(self, present: Sequence[Tensor]) -> None:
        """Let the step that begins run on the kept weights, if there are any."""
        if self._healthy is not None:
            self.num, self.runs = self.num + 1, True
            self._own = Weights.copy(present)
            self._healthy.put_back()

    def give_back(self) -> None:
        """Give the script the weights that it had."""
        if self._own is not None:
            self._own.put_back()
            self._own = None

    def settle(self, *, failed: bool) -> None:
        """A step is over: if it was tried and failed as the first one did, or was the last, no other is."""
        self.give_back()
        if self.runs and (failed or not self.has_more):
            self._healthy = None
        self.runs = False

    def drop(self) -> None:
        """Try no more."""
        self.give_back()
        self._healthy, self.runs = None, False

    @contextlib.contextmanager
    def lent(self, present: Sequence[Tensor]) -> Generator[None]:
        """A context with the kept weights, if there are any, that is no try."""
        own = Weights.copy(present) if self._healthy is not None else None
        try:
            if self._healthy is not None:
                self._healthy.put_back()
            yield
        finally:
            if own is not None:
                own.put_back()
