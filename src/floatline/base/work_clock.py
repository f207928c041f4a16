"""WorkClock: seconds of work, which budgets are counted in, so that a busy machine gives the answers of an idle one."""

from __future__ import annotations

import time


class WorkClock:
    """Counts from when it is made: seconds of the clock, or of the processors if those are fewer.

    On a busy machine the clock goes on while other programs run; with many threads the processors count many times.
    """

    def __init__(self) -> None:
        self._clock, self._work = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """How much work was done so far."""
        return min(time.perf_counter() - self._clock, time.process_time() - self._work)
