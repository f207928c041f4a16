"""Quantiles against closed forms and printed tables; factors against simulated studies."""

import math

import numpy as np
import pytest

from floatline.errors import ComparisonError
from floatline.validation.verdict.statistics import (
    chance_to_cross,
    computed_factors,
    critical_factors,
    nominal_level,
    probability_below,
    quantile,
)
from floatline.validation.verdict.terms import LOOKS


def simulated_chance(looks, factors, num=200_000, seed=5):
    x = np.random.default_rng(seed).standard_normal((num, looks[-1]))
    crossed = np.zeros(num, dtype=bool)
    for n, factor in zip(looks, factors, strict=True):
        crossed |= x[:, :n].mean(axis=1) + factor * x[:, :n].std(axis=1, ddof=1) <= 0
    return crossed.mean()


@pytest.mark.parametrize("t", [-60.0, -3.0, 0.0, 0.1, 5.9, 60.0])
def test_the_tail_is_exact_where_a_closed_form_is_known(t):
    assert probability_below(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
    assert probability_below(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)
    c = t / math.sqrt(4 + t * t)
    assert probability_below(t, 4) == pytest.approx(0.5 + 0.75 * (c - c**3 / 3), abs=1e-12)


@pytest.mark.parametrize(
    ("probability", "freedom", "printed"),
    [(0.95, 2, 2.920), (0.95, 10, 1.812), (0.975, 19, 2.093), (0.99, 4, 3.747), (0.995, 30, 2.750), (0.95, 1e4, 1.645)],
)
def test_quantiles_are_those_of_the_printed_table(probability, freedom, printed):
    assert quantile(probability, freedom) == pytest.approx(printed, abs=5e-4)
    assert quantile(1 - probability, freedom) == pytest.approx(-printed, abs=5e-4)


def test_quantiles_take_broken_degrees_of_freedom():
    assert quantile(0.95, 3) < quantile(0.95, 2.5) < quantile(0.95, 2)
    assert probability_below(quantile(0.95, 2.5), 2.5) == pytest.approx(0.95, abs=1e-10)


def test_the_usual_looks_have_the_factors_of_the_protocol():
    assert critical_factors() == (3.42, 1.52, 0.98, 0.73, 0.54)


def test_the_usual_factors_err_with_at_most_five_percent_and_not_much_less():
    assert 0.048 < chance_to_cross(LOOKS, critical_factors()) <= 0.05


def test_the_usual_factors_are_within_two_percent_of_the_computed_ones():
    level = nominal_level(LOOKS)
    assert level == pytest.approx(0.0139, abs=1e-4)
    assert computed_factors(LOOKS, level) == pytest.approx(critical_factors(), rel=0.014)


def test_smaller_factors_would_err_more_often():
    assert chance_to_cross(LOOKS, tuple(0.9 * k for k in critical_factors())) > 0.06


@pytest.mark.parametrize("looks", [(3, 5), (3, 4, 5, 6), (4, 10), (2, 6, 30)])
def test_other_looks_err_with_five_percent(looks):
    factors = critical_factors(looks)
    assert chance_to_cross(looks, factors) == pytest.approx(0.05, abs=2e-4)
    assert simulated_chance(looks, factors) == pytest.approx(0.05, abs=0.002)  # four standard errors


def test_factors_of_single_looks_used_for_several_err_more():
    looks = (3, 5, 8, 12, 20)
    peeking = tuple(quantile(0.95, n - 1) / math.sqrt(n) for n in looks)
    assert chance_to_cross(looks, peeking) == pytest.approx(simulated_chance(looks, peeking), abs=0.004)
    assert chance_to_cross(looks, peeking) > 0.13


def test_the_quadrature_has_converged():
    finer = chance_to_cross(LOOKS, critical_factors(), num_nodes=80, num_states=384)
    assert chance_to_cross(LOOKS, critical_factors()) == pytest.approx(finer, abs=5e-5)


def test_one_look_is_an_ordinary_interval():
    assert critical_factors((8,)) == pytest.approx((quantile(0.95, 7) / math.sqrt(8),))


@pytest.mark.parametrize("looks", [(), (1, 3), (3, 3), (5, 3)])
def test_looks_that_do_not_rise_are_refused(looks):
    with pytest.raises(ComparisonError, match="must rise"):
        critical_factors(looks)
