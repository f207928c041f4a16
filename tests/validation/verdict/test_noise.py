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


@pytest.mark.parametrize("alpha", [0.01, 0.2])
def test_other_errors_that_are_asked_for_are_kept_as_said(alpha):
    terms, draw = Terms(alpha=alpha), BENCHMARK.SKEWED["exponential"]
    excesses = TERMS.margins[0] + 0.004 * draw(np.random.default_rng(1), (2 * NUM, LOOKS[-1]))
    share = judge_studies(excesses, terms).passed.mean()
    assert share <= terms.error(paired=True)
    if alpha < TERMS.alpha:  # what is said of the usual 5 % would not be true of it
        assert share > alpha * TERMS.error(paired=True) / TERMS.alpha


def test_the_plain_t_interval_passes_it_far_more_often():
    assert BENCHMARK.false_passes(BENCHMARK.SKEWED["exponential"], NUM)[0] > 0.18


def conditions_broken(draw):
    """Which of the three things that a PASS names noise lacks, by its numbers alone."""
    noise = draw(np.random.default_rng(2), (20_000, LOOKS[-1]))
    around = noise - noise.mean()
    first, later = around[:, :-1].ravel(), around[:, 1:].ravel()
    counts, _ = np.histogram(noise, bins=np.quantile(noise, 0.001) + 0.25 * np.arange(60))
    peak = int(counts.argmax())
    rises = [counts[k] - counts[peak + 1 : k].min() for k in range(peak + 2, 59)]
    rises += [counts[k] - counts[k + 1 : peak].min() for k in range(peak - 1)]
    broken = set()
    if abs((first * later).mean() / around.var()) > 0.1:
        broken.add("not independent")
    if max(rises) > 0.002 * noise.size:  # a second peak
        broken.add("several kinds of seeds")
    elif abs(skewness_of(noise.ravel())) > 2.5:  # an exponential's is 2
        broken.add("more skewed")
    return broken


@pytest.mark.parametrize("name", [*BENCHMARK.SYMMETRIC, *BENCHMARK.SKEWED])
def test_rows_that_a_pass_speaks_of_have_what_it_names(name):
    if "Student" in name:  # its third moment is not finite, or hardly
        return
    assert conditions_broken({**BENCHMARK.SYMMETRIC, **BENCHMARK.SKEWED}[name]) == set()


@pytest.mark.parametrize("name", BENCHMARK.BEYOND)
def test_rows_beyond_lack_just_what_the_table_says(name):
    why, draw = BENCHMARK.BEYOND[name]
    assert conditions_broken(draw) == {why}


def test_some_rows_beyond_err_more_often_than_a_pass_says():
    errs = {name: BENCHMARK.false_passes(draw, NUM)[1] for name, (_, draw) in BENCHMARK.BEYOND.items()}
    assert errs["10 % of seeds bad"] > 0.2
    assert errs["half the seeds +1, half -1"] > TERMS.error(paired=True) + ERROR


@pytest.mark.parametrize("arms", [("normal", "normal"), ("normal", "exponential")])
@pytest.mark.parametrize("sizes", [(3, 3), (20, 3), (5, 20)])
def test_arms_that_are_not_paired_err_no_more_than_is_said(arms, sizes):
    num = 3000
    share = BENCHMARK.unpaired_false_passes(*arms, sizes, num)[1]
    assert share <= TERMS.error(paired=False) + 3 * np.sqrt(0.1 * 0.9 / num)


def test_welchs_interval_passes_skewed_arms_far_more_often():
    assert BENCHMARK.unpaired_false_passes("normal", "exponential", (20, 3), 3000)[0] > 0.15


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
