"""Schedule: when a healthy step of a script is recorded."""

from __future__ import annotations

import time

# Applied steps after which the first is recorded, and from which on the second; then at each doubling.
_FIRST, _SECOND = 2, 9
# What all of them but the first may take: this share of the time so far, or so many seconds.
_SHARE, _LITTLE = 0.03, 0.1


class Schedule:
    """Says when to record: after 2 applied steps, after 9, then at each doubling, while it takes little time.

    All but the first are recorded only while recording takes under 3 % of the time so far, or under 0.1 seconds in all;
    else they wait for a later step.

    Attributes:
        num_applied: Optimizer steps that were applied so far.
        due: How many it takes before a step is recorded.
    """

    def __init__(self) -> None:
        self.num_applied = 0
        self.due = _FIRST
        self._began = time.perf_counter()

    def is_due(self, *, spent: float, last: float) -> bool:
        """Whether the step that begins is recorded.

        Args:
            spent: Seconds that recording took so far.
            last: Seconds that the last recorded step took.
        """
        if self.num_applied < self.due:
            return False
        if self.due == _FIRST:
            self.due = _SECOND
            return True
        if spent + last > max(_LITTLE, _SHARE * (time.perf_counter() - self._began)):
            return False
        self.due = 2 * max(self.num_applied, _SECOND)
        return True
