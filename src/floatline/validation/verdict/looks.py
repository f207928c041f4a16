"""One look: the interval of the pairs seen so far, and what it says against the margins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from floatline.errors import ComparisonError
from floatline.validation.verdict.comparison import Look, NoiseFloor, Verdict
from floatline.validation.verdict.pairs import Pair
from floatline.validation.verdict.power import FUTILITY_FROM
from floatline.validation.verdict.statistics import critical_factors
from floatline.validation.verdict.student import quantile
from floatline.validation.verdict.terms import Terms


def judge_interval(low: float, high: float, *, terms: Terms, last: bool) -> Verdict:
    """What an interval says against the two margins; INCONCLUSIVE before the last look means: go on."""
    first, second = terms.margins
    if high <= first:
        return "PASS"
    if low >= second:
        return "FAIL"
    if high <= second and (low > first or last):
        return "MARGINAL"
    return "INCONCLUSIVE"


def judge_look(excesses: Sequence[float], *, terms: Terms) -> Look:
    """The interval of one look, and what it says.

    Numerics:
        mean -+ k * sd, with sd over n - 1. All excesses finite.

    Raises:
        ComparisonError: The number of excesses is not one of the looks.
    """
    num = len(excesses)
    if num not in terms.looks:
        raise ComparisonError(f"{num} seeds are no look of {terms.looks}. Take the first {terms.looks[0]} or so.")
    factor = critical_factors(terms.looks, terms.alpha)[terms.looks.index(num)]
    mean, sd = float(np.mean(excesses)), float(np.std(excesses, ddof=1))
    low, high = mean - factor * sd, mean + factor * sd
    return Look(num, mean, sd, factor, low, high, judge_interval(low, high, terms=terms, last=num == terms.looks[-1]))


def is_futile(look: Look, *, terms: Terms) -> bool:
    """From 5 seeds on: the spread is so wide that the last look could not decide either, k_last * sd > 2 * delta1."""
    widest = critical_factors(terms.looks, terms.alpha)[-1]
    return look.num_seeds >= FUTILITY_FROM and widest * look.sd > 2 * terms.margins[0]


def measure_noise(pairs: Sequence[Pair], *, terms: Terms) -> NoiseFloor | None:
    """How much FP32 differs from itself, from pairs of FP32 and nudged FP32; None with fewer than 2.

    Numerics:
        The half-width is that of a one-sided t interval at alpha, of these seeds alone; it is a gate and no test,
        so that looking again costs nothing. A nudged arm that diverged gives +inf.
    """
    if len(pairs) < 2:
        return None
    excesses = [pair.excess(terms) for pair in pairs]
    num = len(excesses)
    if not all(math.isfinite(value) for value in excesses):
        return NoiseFloor(num, math.inf, math.inf)
    factor = quantile(1.0 - terms.alpha, float(num - 1)) / math.sqrt(num)
    return NoiseFloor(num, float(np.mean(excesses)), factor * float(np.std(excesses, ddof=1)))
