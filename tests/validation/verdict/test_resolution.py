"""The step in which a metric moves, as its values show it."""

import math
import random

import numpy as np
import pytest

from floatline.validation.verdict.resolution import find_step, least_spread
from floatline.validation.verdict.terms import Terms

ACCURACY = Terms("accuracy", higher_is_better=True)


@pytest.mark.parametrize("items", [7, 50, 200, 1319, 10_000])
def test_counts_of_items_show_how_many_there_are(items):
    rng = random.Random(items)
    values = [rng.randint(items // 2, items) / items for _ in range(20)]
    assert find_step(values) == pytest.approx(1 / items, rel=1e-4)


def test_digits_that_were_written_are_a_step_and_float32_does_not_hide_it():
    assert find_step([0.912, 0.914, 0.899, 0.905]) == pytest.approx(0.001)
    assert find_step([0.9200000166893005, 0.8999999761581421, 0.8600000143051147]) == pytest.approx(0.02, rel=1e-4)


@pytest.mark.parametrize("items", [100, 333, 1000, 10_000])
@pytest.mark.parametrize("whole", [1.0, 100.0])
def test_counts_divided_in_float32_show_their_items(items, whole):
    rng = random.Random(items)
    values = [float(np.float32(whole) * (np.float32(rng.randint(items // 2, items)) / items)) for _ in range(12)]
    assert find_step(values) == pytest.approx(whole / items, rel=1e-3)


def test_counts_that_noise_moves_by_more_than_float32_does_show_no_step():
    rng = random.Random(0)
    values = [rng.randint(50, 100) / 100 + rng.uniform(-1e-4, 1e-4) for _ in range(6)]
    assert find_step(values) < 1e-3


def test_a_continuous_metric_has_no_step_that_matters():
    rng = random.Random(0)
    assert all(find_step([rng.gauss(2.0, 0.02) for _ in range(6)]) < 1e-4 for _ in range(200))


def test_values_that_are_all_the_same_show_none():
    assert find_step([0.9, 0.9, 0.9]) == 0.0


def test_the_spread_is_that_of_rounding_on_each_scale():
    values = [0.92, 0.9, 0.9, 0.9, 0.94, 0.92]
    step = 0.02 / math.sqrt(6)
    assert least_spread(values, ACCURACY) == pytest.approx(step / 0.9, rel=1e-3)
    assert least_spread(values, Terms("accuracy", higher_is_better=True, scale="log-error")) == pytest.approx(
        step / 0.06, rel=1e-3
    )
    assert least_spread(values, Terms("accuracy", scale="difference")) == pytest.approx(step, rel=1e-3)


def test_a_step_that_was_asked_for_counts():
    values = [0.9, 0.9, 0.9, 0.9]
    assert least_spread(values, ACCURACY) == 0.0
    assert least_spread(values, Terms("accuracy", higher_is_better=True, resolution=0.001)) == pytest.approx(
        0.001 / math.sqrt(6) / 0.9
    )
