"""The resolution of a metric: the step in which it moves, where it counts few items or was written with few digits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from floatline.validation.verdict.statistics import Array
from floatline.validation.verdict.terms import Terms

# FP32 keeps values, means and percentages of counts, to this share of the largest; a step is a few times as much.
_KEPT, _FINEST = 5e-7, 1e-5
# The difference of two numbers that were rounded to steps of 1 spreads by so much.
_ROUNDED = 1.0 / math.sqrt(6.0)


def find_step(values: Sequence[float]) -> float:
    """The largest step of which all differences of some values are multiples; 0 where all are the same.

    Numerics:
        The widest difference is a whole number of steps: 1, 2, 3 … are tried, until all differences are multiples to
        5e-7 of the largest value, so that counts divided in FP32 show their step. Below 1e-5 of it nothing could be
        told from chance: that is the step of a continuous metric.
    """
    sizes = np.asarray(values, dtype=np.float64)
    apart, largest = np.unique(sizes - sizes.min()), float(np.abs(sizes).max())
    if apart[-1] <= _KEPT * largest:
        return 0.0
    steps: Array = apart[-1] / np.arange(1, max(2, apart[-1] / (_FINEST * largest)))
    for one in apart:
        steps = steps[np.abs(one - np.round(one / steps) * steps) <= _KEPT * largest]
    return float(steps[0]) if len(steps) else _FINEST * largest


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
