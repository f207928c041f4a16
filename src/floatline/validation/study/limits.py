"""Limits: how long each arm of a study trains, and when it is looked at on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from floatline.errors import ComparisonError

NUM_CHECKPOINTS = 12


@dataclass(frozen=True)
class Limits:
    """How long each arm trains. Zero is no training, which a gate refuses.

    Args:
        steps: Steps; None: `epochs`, or one pass over the batches or 200 steps, whichever is longer.
        epochs: Passes over the batches.
        batches: Batches of the target that are used, the first ones; None is all.
    """

    steps: int | None = None
    epochs: int | None = None
    batches: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ComparisonError(f"steps {self.steps} and epochs {self.epochs} are both given. Give one of them.")
        for name, value in (("steps", self.steps), ("epochs", self.epochs), ("batches", self.batches)):
            if value is not None and value < 0:
                raise ComparisonError(f"{name} is {value}. Give a whole number above 0.")

    def steps_of(self, num_batches: int, accumulate: int) -> int:
        """Steps of a target with so many batches."""
        if self.batches is not None:
            num_batches = min(num_batches, self.batches)
        if num_batches == 0:
            return 0
        if self.steps is not None:
            return self.steps
        one_pass = math.ceil(num_batches / accumulate)
        return max(200, one_pass) if self.epochs is None else self.epochs * one_pass


def checkpoints_of(steps: int) -> tuple[int, ...]:
    """At most 12 steps, evenly spread, the last one among them."""
    return tuple(sorted({math.ceil(steps * place / NUM_CHECKPOINTS) for place in range(1, NUM_CHECKPOINTS + 1)}))
