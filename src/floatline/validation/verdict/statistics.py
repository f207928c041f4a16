"""Student's t, critical factors and skewness: how wide an interval must be that is looked at several times."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from floatline.validation.verdict.terms import LOOKS, check_looks

Array = NDArray[np.float64]

_LEVEL_TOLERANCE = 1e-6
_NUM_NODES = 40
_NUM_STATES = 192
# The protocol's published factors. Computed ones are within 1.4 %; with these all looks together err with 4.9 %.
_USUAL = (3.42, 1.52, 0.98, 0.73, 0.54)
# A few numbers show less of the skewness of their noise than it has, and three of them nearly none.
_SKEW_GAIN, _SKEW_LEAST = 3.0, 0.7


def critical_factors(looks: tuple[int, ...] = LOOKS, alpha: float = 0.05) -> tuple[float, ...]:
    """k of each look: mean -+ k * sd errs on each side with a chance of at most alpha over all looks together.

    Numerics:
        k_n = t(1 - p, n - 1) / sqrt(n), with one nominal level p for all looks. See `nominal_level`.
        The usual looks have the protocol's published factors, which stand for p = 0.0136 and err with 4.9 %.
        Computing them for 5 % gives p = 0.0139, and factors within 1.4 % of these.

    Args:
        looks: Numbers of pairs, rising, from 2 on.
        alpha: Chance of each one-sided error.
    """
    looks = tuple(looks)
    if looks == LOOKS and alpha == 0.05:
        return _USUAL
    return computed_factors(looks, nominal_level(looks, alpha))


def computed_factors(looks: tuple[int, ...], level: float) -> tuple[float, ...]:
    """k of each look at one nominal level."""
    return tuple(quantile(1.0 - level, float(n - 1)) / math.sqrt(n) for n in looks)


def reach(factor: float, num: int, skew: Array) -> Array:
    """How many standard deviations the upper end of an interval lies above the mean: `outward`, for paired numbers.

    Args:
        factor: k of the look, which is the reach without any skewness.
        num: Pairs.
        skew: g, for each study.
    """
    return outward(factor * math.sqrt(num), num, skew) / math.sqrt(num)


def outward(t: float | Array, num: float | Array, skew: float | Array) -> Array:
    """How many standard errors the upper end of an interval lies above the mean, where noise is skewed.

    A long tail upwards is seldom in a small sample, whose mean and spread are then too small both. The lower end is
    that of the numbers with their signs turned.

    Numerics:
        The first effect of skewness G on t (Johnson 1978): the end moves outwards by
            G (1 + 2 t^2) / (6 sqrt(n))
        standard errors. G = max(0, 3 g) + 0.7, with g the sample's own skewness, of which a few numbers show but a
        part. With these two numbers, settled by simulation, all looks together say PASS of a candidate that is worse
        by just the margin in at most 6 % of studies with symmetric noise and 8 % with skewed noise up to
        lognormal(0.5) and exponential; other looks, such as early ones alone, and arms that are not paired, in at
        most 10 %. Checked by tests/validation/verdict/test_noise.py.

    Args:
        t: The reach without any skewness.
        num: Numbers of the study; of two arms, those of the smaller one.
        skew: g; of a difference of two means the third cumulant over the 3/2th power of the variance, times sqrt(num).
    """
    skewness = np.maximum(_SKEW_GAIN * np.asarray(skew), 0.0) + _SKEW_LEAST
    return t + skewness * (1.0 + 2.0 * np.square(t)) / (6.0 * np.sqrt(num))


def follows(values: Array) -> float:
    """How much of each number's difference from the mean the next one takes over: the lag-1 autocorrelation."""
    apart = values - values.mean()
    square = float(apart @ apart)
    return float(apart[:-1] @ apart[1:]) / square if square > 0 else 0.0


def skewness_of(values: Array) -> Array:
    """The third moment about the mean of each row, over the second to the power of 3/2; 0 where all are the same."""
    apart = values - values.mean(axis=-1, keepdims=True)
    second, third = (apart**2).mean(axis=-1), (apart**3).mean(axis=-1)
    spread = np.where(second > 0, second, 1.0) ** 1.5
    return np.where(second > 0, third / spread, 0.0)


@cache
def nominal_level(looks: tuple[int, ...], alpha: float = 0.05) -> float:
    """The one-sided level of each single look at which all looks together err with a chance of alpha.

    Numerics:
        Found by the secant rule on `chance_to_cross`, whose quadrature is good to 1e-4 of chance (1e-5 where each
        look adds two seeds or more). One look gives alpha itself.
    """
    check_looks(looks)
    if len(looks) == 1:
        return alpha
    low, high = alpha / len(looks), alpha
    low_gap, high_gap = (chance_to_cross(looks, computed_factors(looks, level)) - alpha for level in (low, high))
    while high - low > _LEVEL_TOLERANCE:
        level = high - high_gap * (high - low) / (high_gap - low_gap)
        gap = chance_to_cross(looks, computed_factors(looks, level)) - alpha
        if abs(gap) < _LEVEL_TOLERANCE:
            return level
        # Halving the end that stays keeps both ends moving (the Illinois rule).
        if gap < 0:
            low, low_gap, high_gap = level, gap, 0.5 * high_gap
        else:
            high, high_gap, low_gap = level, gap, 0.5 * low_gap
    return low


def chance_to_cross(
    looks: tuple[int, ...],
    factors: tuple[float, ...],
    *,
    num_nodes: int = _NUM_NODES,
    num_states: int = _NUM_STATES,
) -> float:
    """Chance that mean + k * sd is below the truth at some look: the error of all looks together, on one side.

    Numerics:
        The data at look n, less the truth, are a point x of R^n whose direction is uniform, and u = cos(angle of x
        to the diagonal) tells t: u = t / sqrt(n - 1 + t^2). From look m to look n = m + d
            u_n = sqrt(m / n) * cos(f) * u_m + sqrt(d / n) * sin(f) * v,
        where f splits the length of x between old and new data, density ~ cos^(m-1) f sin^(d-1) f, and v is the
        same cosine in R^d. Neither depends on u_m, so u is a Markov chain, and the chance not to cross is one
        integral over f and v for each look, backwards from the last. Normal data are assumed.
        Checked by tests/validation/verdict/test_statistics.py against simulated studies.
    """
    edges = [-factor * math.sqrt(n) for factor, n in zip(factors, looks, strict=True)]
    cuts = [math.acos(t / math.sqrt(n - 1 + t * t)) for t, n in zip(edges, looks, strict=True)]
    # From the last look back: the chance to survive all later looks, over the angle of u.
    states, values = np.array([0.0, cuts[-1]]), np.array([1.0, 1.0])
    for place in range(len(looks) - 2, -1, -1):
        earlier = np.linspace(0.0, cuts[place], num_states)
        values = _survival(np.cos(earlier), looks[place], looks[place + 1], states, values, num_nodes)
        states = earlier
    angles, weights = _gauss(0.0, cuts[0], 4 * num_nodes)
    return 1.0 - float(weights @ (np.interp(angles, states, values) * _direction_density(angles, looks[0])))


def _survival(u: Array, old: int, new: int, states: Array, values: Array, num_nodes: int) -> Array:
    """For each u at the old look: the chance not to cross at the new look, nor at any after it."""
    num_new = new - old
    splits, split_weights = _gauss(0.0, math.pi / 2, num_nodes)
    density = np.cos(splits) ** (old - 1) * np.sin(splits) ** (num_new - 1)
    split_weights = split_weights * density / (split_weights @ density)
    offset = math.sqrt(old / new) * u[:, None] * np.cos(splits)
    reach = math.sqrt(num_new / new) * np.sin(splits)
    edge = math.cos(float(states[-1]))

    def survive(cosine: Array) -> Array:
        return np.interp(np.arccos(np.clip(cosine, -1.0, 1.0)), states, values)

    if num_new == 1:  # one new value: its cosine is +1 or -1
        both = [np.where(offset + s * reach >= edge, survive(offset + s * reach), 0.0) for s in (1.0, -1.0)]
        return 0.5 * (both[0] + both[1]) @ split_weights
    # v = cos(w): only angles w up to the edge survive.
    widest = np.arccos(np.clip((edge - offset) / reach, -1.0, 1.0))
    base, base_weights = _gauss(0.0, 1.0, num_nodes // 2)
    w = widest[..., None] * base
    inner = survive(offset[..., None] + reach[:, None] * np.cos(w)) * _direction_density(w, num_new)
    return (widest * (inner @ base_weights)) @ split_weights


def _direction_density(angle: Array, dimensions: int) -> Array:
    """Density of the angle between a uniform direction of R^d and a fixed one."""
    constant = math.exp(math.lgamma(dimensions / 2) - math.lgamma((dimensions - 1) / 2)) / math.sqrt(math.pi)
    return constant * np.sin(angle) ** (dimensions - 2)


def _gauss(low: float, high: float, num: int) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights on an interval."""
    nodes, weights = _nodes(num)
    return low + 0.5 * (high - low) * (nodes + 1.0), 0.5 * (high - low) * weights


@cache
def _nodes(num: int) -> tuple[Array, Array]:
    return np.polynomial.legendre.leggauss(num)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(120)


def probability_below(t: float, freedom: float) -> float:
    """P(T <= t) for `freedom` degrees of freedom, which need not be whole.

    Numerics:
        With t = sqrt(freedom) * tan(a) the density becomes cos(a) ** (freedom - 1), which 120 Gauss-Legendre nodes
        integrate to 1e-12 for 1 to 10,000 degrees and |t| <= 100. Checked by
        tests/validation/verdict/test_statistics.py against the closed forms for 1, 2 and 4 degrees,
        and a printed table.
    """
    angle = math.atan2(abs(t), math.sqrt(freedom))
    at = 0.5 * angle * (_NODES + 1.0)
    area = 0.5 * angle * float(_WEIGHTS @ np.cos(at) ** (freedom - 1.0))
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return 0.5 + math.copysign(constant * area, t)


@cache
def quantile(probability: float, freedom: float) -> float:
    """The t that `probability` of the distribution lies below.

    Numerics:
        Bisection of `probability_below` until the two ends meet, to about 1e-11 of t.

    Args:
        probability: Between 0 and 1, ends excluded.
        freedom: Degrees of freedom, above 0.
    """
    if probability < 0.5:
        return -quantile(1.0 - probability, freedom)
    low, high = 0.0, 1.0
    while probability_below(high, freedom) < probability:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = 0.5 * (low + high)
        if probability_below(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)
