"""Looks: what the pairs seen so far say, how many seeds that takes, and how long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from floatline.errors import ComparisonError
from floatline.validation.verdict.comparison import Look, NoiseFloor, PowerPlan, Verdict
from floatline.validation.verdict.pairs import Pair
from floatline.validation.verdict.statistics import critical_factors, quantile, reach, skewness_of
from floatline.validation.verdict.terms import Terms, seeds_to_bound

USUAL_SPREADS = (0.0025, 0.005, 0.01, 0.02)
FUTILITY_FROM = 5
_MOST_SEEDS = 1000
_POWER = 0.9
_NUM_STUDIES, _NUM_SINGLE = 4000, 2000


@dataclass(frozen=True)
class Studies:
    """What many simulated studies ended in.

    Args:
        passed: One flag for each study; likewise `failed` and `marginal`.
        num_seeds: The seeds that each used.
    """

    passed: NDArray[np.bool_]
    failed: NDArray[np.bool_]
    marginal: NDArray[np.bool_]
    num_seeds: NDArray[np.int64]


def seeds_needed(sd: float, margin: float, *, alpha: float = 0.05) -> int | None:
    """Pairs with which one look shows "no worse than the margin" in 90 % of studies of an equal candidate.

    Numerics:
        By 2,000 simulated studies with normal noise, drawn from a fixed seed, from 3 pairs on.
        For a margin of 1 %: sd 0.25 % needs 4, 0.5 % needs 6, 1 % needs 14, 2 % needs 42.

    Returns:
        The number, or None where 1,000 are not enough.
    """
    draws = np.random.default_rng(0).standard_normal((_NUM_SINGLE, _MOST_SEEDS))

    def passes(num: int) -> bool:
        seen, factor = sd * draws[:, :num], critical_factors((num,), alpha)[0]
        high = seen.mean(axis=1) + reach(factor, num, skewness_of(seen)) * seen.std(axis=1, ddof=1)
        return bool((high <= margin).mean() >= _POWER)

    # The power only rises with the number, so halving finds it.
    low, high = 2, _MOST_SEEDS
    if not passes(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high


def judge_studies(excesses: NDArray[np.float64], terms: Terms) -> Studies:
    """The rule of `verdict.judge_look`, look by look, for many studies at once.

    Args:
        excesses: One row for each study, one column for each pair, as many as the last look.
        terms: Margins, looks and the share to rule out. Gates, curves and the noise floor play no part.
    """
    (first, second), looks = terms.margins, terms.looks
    enough = seeds_to_bound(terms.rare) if terms.rare is not None else 0
    factors = critical_factors(looks, terms.alpha)
    num = len(excesses)
    done, passed, failed, marginal = (np.zeros(num, dtype=np.bool_) for _ in range(4))
    num_seeds = np.full(num, looks[-1])
    for n, factor in zip(looks, factors, strict=True):
        seen = excesses[:, :n]
        mean, sd, skew = seen.mean(axis=1), seen.std(axis=1, ddof=1), skewness_of(seen)
        low, high = mean - reach(factor, n, -skew) * sd, mean + reach(factor, n, skew) * sd
        passes = ~done & (high <= first) & (n >= enough)
        fails = ~done & (low >= second)
        between = ~done & ~passes & ~fails & (high <= second) & ((low > first) | (n == looks[-1]))
        futile = ~done & (n >= FUTILITY_FROM) & (factors[-1] * sd > 2 * first)
        passed |= passes
        failed |= fails
        marginal |= between
        ends = passes | fails | between | futile
        num_seeds[ends] = n
        done |= ends
    return Studies(passed, failed, marginal, num_seeds)


def plan_seeds(
    sd: float,
    *,
    terms: Terms,
    seconds_per_seed: float | None = None,
    num_at_once: int = 1,
    num_studies: int = _NUM_STUDIES,
) -> PowerPlan:
    """What to expect of a comparison whose pairs differ with this spread, where the candidate is as good as FP32.

    Numerics:
        Share of PASS and seeds used are means over simulated normal studies, drawn from a fixed seed; 4,000 of them
        give the share to 0.8 % or better (one standard error).

    Args:
        sd: Paired standard deviation of the excess, assumed or seen.
        terms: Margins and looks.
        seconds_per_seed: Time of all arms of one seed, one after another.
        num_at_once: Seeds that run side by side.
        num_studies: Simulated studies.
    """
    draws = np.random.default_rng(0).standard_normal((num_studies, terms.looks[-1]))
    studies = judge_studies(draws * sd, terms)
    expected = float(studies.num_seeds.mean())
    seconds = None if seconds_per_seed is None else seconds_per_seed / num_at_once
    return PowerPlan(
        sd=sd,
        seeds_needed=seeds_needed(sd, terms.margins[0], alpha=terms.alpha),
        pass_rate=float(studies.passed.mean()),
        expected_seeds=expected,
        most_seeds=terms.looks[-1],
        seconds=None if seconds is None else seconds * expected,
        most_seconds=None if seconds is None else seconds * terms.looks[-1],
    )


def describe_plans(plans: Sequence[PowerPlan], *, terms: Terms) -> str:
    """The plan for people, before anything runs: one line for each spread."""
    first, second = (terms.size(margin) for margin in terms.margins)
    looks = ", ".join(str(look) for look in terms.looks)
    lines = [
        f"PASS up to {first} worse, FAIL from {second} worse. Looks at {looks} seeds; it ends as soon as it is decided."
    ]
    for plan in plans:
        line = (
            f"  if pairs spread by {terms.size(plan.sd)}: about {plan.expected_seeds:.0f} seeds, "
            f"{100 * plan.pass_rate:.0f} % of equal candidates pass"
        )
        if plan.seconds is not None and plan.most_seconds is not None:
            line += f", {show_seconds(plan.seconds)} (at most {show_seconds(plan.most_seconds)})"
        if plan.pass_rate < 0.9:
            needed = f"{plan.seeds_needed}" if plan.seeds_needed else f"over {_MOST_SEEDS:,}"
            line += f"; 90 % would take {needed} seeds"
        lines.append(line)
    return "\n".join(lines)


def show_seconds(seconds: float) -> str:
    """A duration for people: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def say_left(num: int, seconds: float | None) -> str:
    """What is left up to the next look, for people: '5 runs to the next look, about 40 s'."""
    if not num:
        return "a look is taken"
    time = "" if seconds is None else f", about {show_seconds(seconds)}"
    return f"{num} run{'s' * (num > 1)} to the next look{time}"


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


def judge_look(excesses: Sequence[float], *, terms: Terms, least_sd: float = 0.0) -> Look:
    """The interval of one look, and what it says.

    Numerics:
        The ends are mean - reach(-g) * sd and mean + reach(g) * sd, with sd over n - 1 and the skewness g of the
        excesses: see `statistics.reach`. All excesses finite. Without any spread nothing is decided.

    Args:
        excesses: One for each pair.
        terms: Margins and looks.
        least_sd: The spread counts as this at least: see `resolution.least_spread`.

    Raises:
        ComparisonError: The number of excesses is not one of the looks.
    """
    num = len(excesses)
    if num not in terms.looks:
        raise ComparisonError(
            f"{num} seeds are not one of the looks {terms.looks}. Take the first {terms.looks[0]} or so."
        )
    factor = critical_factors(terms.looks, terms.alpha)[terms.looks.index(num)]
    seen = np.asarray(excesses, dtype=np.float64)
    mean, sd, skew = float(seen.mean()), max(float(seen.std(ddof=1)), least_sd), skewness_of(seen)
    low, high = mean - float(reach(factor, num, -skew)) * sd, mean + float(reach(factor, num, skew)) * sd
    verdict = judge_interval(low, high, terms=terms, last=num == terms.looks[-1]) if sd else "INCONCLUSIVE"
    return Look(num, mean, sd, factor, low, high, verdict, float(skew))


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
