"""Schedule: which healthy steps of a script are recorded."""

from __future__ import annotations

# Applied steps after which the first and the second are recorded; then whenever there are four times as many.
FIRST, _SECOND, _FACTOR = 2, 9, 4
# Seconds after which no further healthy step is recorded.
BUDGET = 60.0


class Schedule:
    """Says when to record: after 2 applied steps, after 9, then whenever there are four times as many.

    What is recorded depends on the number of applied steps alone. A budget of time only ends recording, and then
    `ended_at` says so.

    Attributes:
        num_applied: Optimizer steps that were applied so far.
        due: How many it takes before a step is recorded.
        ended_at: The number of applied steps at which the budget was spent; None while it is not.
    """

    def __init__(self) -> None:
        self.num_applied = 0
        self.due = FIRST
        self.ended_at: int | None = None

    def is_due(self, *, spent: float, after: int = 0) -> bool:
        """Whether the step that begins is recorded.

        Args:
            spent: Seconds that recording took so far.
            after: How many more steps will have been applied by then.
        """
        if self.num_applied + after < self.due or self.ended_at is not None:
            return False
        if spent > BUDGET:
            self.ended_at = self.num_applied
            return False
        while self.due <= self.num_applied + after:
            self.due = _SECOND if self.due < _SECOND else _FACTOR * self.due
        return True
