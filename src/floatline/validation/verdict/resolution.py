"""The resolution of a metric: the step in which it moves, where it counts few items or was written with few digits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from floatline.validation.verdict.terms import Terms

# Steps below this share of the values are none: rounding of FP32 makes as much.
_FINEST = 1e-6
# The difference of two numbers that were rounded to steps of 1 spreads by so much.
_ROUNDED = 1.0 / math.sqrt(6.0)


def find_step(values: Sequence[float]) -> float:
    """The largest step of which all differences of some values are multiples; 0 where all are the same.

    Numerics:
        Euclid's rule on the differences, which ends where a remainder is below 1e-6 of the largest value. Values of a
        continuous metric give a step of about that size.
    """
    first, finest = values[0], _FINEST * max(map(abs, values))
    step = 0.0
    for value in values[1:]:
        rest = abs(value - first)
        while rest > finest:
            step, rest = rest, abs(step - round(step / rest) * rest)
    return step


def least_spread(values: Sequence[float], terms: Terms) -> float:
    """The spread that the excesses of pairs have at least, since the metric moves in steps; 0 where no step is known.

    Numerics:
        Of two numbers that were rounded to a step q the difference spreads by q / sqrt(6). The step is the one that
        was asked for, or what the values show; on a scale of logarithms it is taken of the smallest of them.

    Args:
        values: The metric of every run, of both arms.
        terms: Scale, and the step where it was said.
    """
    step = terms.resolution if terms.resolution is not None else find_step(values)
    if terms.scale == "difference":
        return _ROUNDED * step
    sizes = [1.0 - value if terms.scale == "log-error" else value for value in values]
    return _ROUNDED * step / min(sizes)
