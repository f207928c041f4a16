"""Best: the best metric so far, and the checkpoint that has it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run.

    Args:
        step: Steps done when it was evaluated.
        metric: The metric then, in FP32.
    """

    step: int
    metric: float

    @classmethod
    def of(cls, saved: Any) -> Best | None:
        """What `as_json` wrote; None for a run that evaluated nothing."""
        return None if saved is None else cls(**saved)

    def as_json(self) -> dict[str, Any]:
        """Plain data for a checkpoint or a report."""
        return asdict(self)


def is_better(metric: float, best: Best | None, *, higher_is_better: bool) -> bool:
    """Whether a metric is the best so far; a NaN never is, and of two equal ones the first stays."""
    if math.isnan(metric) or best is None:
        return best is None and not math.isnan(metric)
    return metric > best.metric if higher_is_better else metric < best.metric
