"""Schedule: when a healthy step of a script is recorded."""

from __future__ import annotations

import time

# Applied steps after which one is always recorded; from then on at each doubling, for a share of the time.
_ALWAYS = (2, 9)
_SHARE = 0.05


class Schedule:
    """Says when to record: after 2 and 9 applied steps, then at each doubling while it takes under 5 % of the time.

    Attributes:
        num_applied: Optimizer steps that were applied so far.
    """

    def __init__(self) -> None:
        self.num_applied = 0
        self._due = _ALWAYS[0]
        self._began = time.perf_counter()

    def is_due(self, *, spent: float, last: float) -> bool:
        """Whether the step that begins is recorded.

        Args:
            spent: Seconds that recording took so far.
            last: Seconds that the last recorded step took.
        """
        if self.num_applied < self._due:
            return False
        always = self._due in _ALWAYS
        self._due = _ALWAYS[1] if self._due == _ALWAYS[0] else 2 * max(self.num_applied, _ALWAYS[1])
        return always or spent + last <= _SHARE * (time.perf_counter() - self._began)
