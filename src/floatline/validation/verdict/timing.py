"""Timing: which of two arms is faster, from interleaved pairs of steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from floatline.base.plain_records import from_plain, to_plain
from floatline.errors import ComparisonError

_CONFIDENCE = 0.95  # wanted of an interval


@dataclass(frozen=True)
class Timing:
    """Seconds of the candidate over seconds of the reference, in pairs that ran next to each other.

    Args:
        ratio: Median over the pairs; 0.5 is twice as fast.
        low: Lower end of the interval of that median.
        high: Upper end.
        confidence: Chance that the interval holds the true median; below 0.95 where there are fewer than 6 pairs.
        num_pairs: Pairs measured, warm-up not among them.
    """

    ratio: float
    low: float
    high: float
    confidence: float
    num_pairs: int

    @property
    def speedup(self) -> float:
        """How many times as fast the candidate is."""
        return 1.0 / self.ratio

    @property
    def verdict(self) -> Literal["faster", "slower", "no difference shown"]:
        """'faster' or 'slower' only where the whole interval is on one side of 1, with 95 % confidence."""
        if self.confidence < _CONFIDENCE or self.low <= 1.0 <= self.high:
            return "no difference shown"
        return "faster" if self.high < 1.0 else "slower"

    def as_json(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return to_plain(self)

    @classmethod
    def from_json(cls, data: Any) -> Timing:
        """The timing that `as_json` wrote; ComparisonError for anything else."""
        return from_plain(cls, data)


def draw_order(num_pairs: int, *, seed: int = 0) -> tuple[tuple[str, str], ...]:
    """For each pair which arm runs first: ('A', 'B') or ('B', 'A'), as often the one as the other, shuffled."""
    orders = [("A", "B") if place % 2 else ("B", "A") for place in range(num_pairs)]
    random.Random(seed).shuffle(orders)  # noqa: S311 - no secret depends on it
    return tuple(orders)


def compare_times(reference: Sequence[float], candidate: Sequence[float]) -> Timing:
    """Median of the paired ratios, with the interval that order statistics give.

    Numerics:
        The median of ln(candidate / reference). The interval is between the j-th smallest and the j-th largest
        pair, j as large as 1 - 2 * P(Binomial(n, 1/2) < j) >= 0.95 allows; nothing is assumed about the
        distribution of times. With fewer than 6 pairs 95 % cannot be reached: the interval is then from the
        smallest to the largest, and `confidence` says what it is worth.

    Args:
        reference: Seconds of the reference, pair by pair, without warm-up and compilation.
        candidate: Seconds of the candidate in the same pairs.

    Raises:
        ComparisonError: No pairs, a different number in the two arms, or a time that is not above zero.
    """
    if not reference or len(reference) != len(candidate):
        raise ComparisonError(
            f"{len(reference)} times of the reference and {len(candidate)} of the candidate make no pairs. "
            "Time both arms equally often, at least once."
        )
    wrong = [time for time in (*reference, *candidate) if not 0 < time < math.inf]
    if wrong:
        raise ComparisonError(f"A step took {wrong[0]} s. Measure with time.perf_counter around a synchronised step.")
    ratios = sorted(math.log(b / a) for a, b in zip(reference, candidate, strict=True))
    num = len(ratios)
    place = _rank(num)
    middle = 0.5 * (ratios[(num - 1) // 2] + ratios[num // 2])
    return Timing(
        ratio=math.exp(middle),
        low=math.exp(ratios[place - 1]),
        high=math.exp(ratios[num - place]),
        confidence=_coverage(num, place),
        num_pairs=num,
    )


def _rank(num: int) -> int:
    """The largest j whose interval still has the wanted confidence, and at least 1."""
    place = 1
    while place + 1 <= num // 2 and _coverage(num, place + 1) >= _CONFIDENCE:
        place += 1
    return place


def _coverage(num: int, place: int) -> float:
    """Chance that the true median is between the j-th smallest and the j-th largest of n values."""
    return 1.0 - 2.0 * sum(math.comb(num, k) for k in range(place)) / 2**num
