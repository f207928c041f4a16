"""What is printed beside a PASS holds for every kind of noise that it names, and fails for the plain t interval."""

import numpy as np
import pytest
from tests.slow import slow
from tests.validation.studies import load_benchmark

from floatline.validation.verdict.power import judge_look, judge_studies
from floatline.validation.verdict.statistics import critical_factors, reach, skewness_of
from floatline.validation.verdict.terms import LOOKS, Terms

BENCHMARK = load_benchmark()
TERMS = Terms()
NUM = 20_000
ERROR = 3 * np.sqrt(0.08 * 0.92 / NUM)  # three standard errors of a share of 8 %


@pytest.mark.parametrize("name", BENCHMARK.SYMMETRIC)
def test_symmetric_noise_passes_what_is_worse_by_the_margin_in_at_most_6_of_100(name):
    assert BENCHMARK.false_passes(BENCHMARK.SYMMETRIC[name], NUM)[1] <= 0.06


@pytest.mark.parametrize("name", BENCHMARK.SKEWED)
def test_skewed_noise_passes_it_in_no_more_than_is_said(name):
    assert BENCHMARK.false_passes(BENCHMARK.SKEWED[name], NUM)[1] <= TERMS.error(paired=True) + ERROR


@pytest.mark.parametrize("looks", [(2,), (3,), (4,), (5,), (12,), (3, 5), (3, 5, 8), (6, 8, 10), (8, 12, 20), (29,)])
def test_other_looks_err_no_more_than_is_said(looks):
    terms, draw = Terms(looks=looks), BENCHMARK.SKEWED["exponential"]
    excesses = TERMS.margins[0] + 0.004 * draw(np.random.default_rng(1), (NUM, looks[-1]))
    assert judge_studies(excesses, terms).passed.mean() <= terms.error(paired=True)


def test_the_plain_t_interval_passes_it_far_more_often_and_so_does_noise_beyond_what_is_said():
    assert BENCHMARK.false_passes(BENCHMARK.SKEWED["exponential"], NUM)[0] > 0.18
    assert BENCHMARK.false_passes(BENCHMARK.BEYOND["10 % of seeds bad"], NUM)[1] > 0.2


@slow
@pytest.mark.parametrize("items", [50, 200])
def test_a_coarse_metric_passes_it_no_more_often(items):
    blind, seeing = BENCHMARK.coarse_passes(items, 1000)
    assert seeing <= 0.06
    assert blind > 0.07


def test_many_studies_and_one_are_judged_alike():
    draws = 0.004 * np.random.default_rng(3).exponential(size=(40, LOOKS[-1]))
    studies = judge_studies(draws, TERMS)
    for row, passed, num in zip(draws, studies.passed, studies.num_seeds, strict=True):
        verdicts = [judge_look(row[:n], terms=TERMS).verdict for n in LOOKS if n <= num]
        assert (verdicts[-1] == "PASS") == passed


def test_the_reach_grows_with_skewness_to_its_side_and_is_the_factor_where_seeds_are_many():
    skews = np.linspace(-2.0, 2.0, 9)
    for n, factor in zip(LOOKS, critical_factors(), strict=True):
        ends = reach(factor, n, skews)
        assert (np.diff(ends) >= 0).all()
        assert (ends > factor).all()
    far = critical_factors((1000,))[0]
    assert reach(far, 1000, np.zeros(1)) == pytest.approx(far, rel=0.02)


def test_skewness_is_that_of_a_worked_example_and_0_without_spread():
    # mean 2, deviations -1, -1, 2: second moment 2, third 2
    assert skewness_of(np.array([1.0, 1.0, 4.0])) == pytest.approx(2.0 / 2.0**1.5)
    assert skewness_of(np.array([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])) == pytest.approx([0.0, 0.0])
