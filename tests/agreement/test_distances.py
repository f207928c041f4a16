"""Distances: of whole tensors, and of rows against what rounding explains."""

import math

import pytest
import torch

from floatline.agreement.arithmetic import SPREAD
from floatline.agreement.distances import measure_distance, measure_excess, measure_noise

TRUTH = torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(
    ("x", "distance"),
    [
        ([3.0, 4.0], 0.0),
        ([3.0, 4.5], 0.1),
        ([math.nan, 4.0], math.inf),
        ([math.inf, 4.0], math.inf),
        ([3.0, 4.0, 5.0], math.inf),
    ],
)
def test_the_distance_is_that_of_norms(x, distance):
    assert measure_distance(torch.tensor(x), TRUTH) == pytest.approx(distance)


def test_masked_numbers_are_equal_whatever_the_lowest_number_of_the_format():
    truth = torch.tensor([1.0, torch.finfo(torch.float64).min, -math.inf], dtype=torch.float64)
    low = torch.tensor([1.0, torch.finfo(torch.float16).min, -math.inf], dtype=torch.float16)
    assert measure_distance(low, truth) == 0
    assert measure_distance(torch.tensor([1.0, 0.0, -math.inf]), truth) == math.inf
    assert measure_distance(torch.tensor([1.0, torch.finfo(torch.float16).min, 2.0]), truth) == math.inf


def noise_of(truth):
    return measure_noise(truth, [truth + SPREAD * 1e-3 * torch.ones_like(truth)])


def test_one_wrong_row_of_many_is_found_and_a_right_one_is_not():
    truth = torch.randn(1000, 16, dtype=torch.float64)
    error = 1e-3 * torch.randn(1000, 16, dtype=torch.float64)
    excess, _ = measure_excess(truth + error, truth, noise_of(truth))
    assert 0.8 < excess < 1.5
    error[417] *= 20
    excess, row = measure_excess(truth + error, truth, noise_of(truth))
    assert row == (417,)
    assert excess > 5
    assert measure_distance(truth + error, truth) < 1.3e-3  # as a whole it cannot be seen


def test_what_does_not_round_must_be_equal():
    truth = torch.randn(4, 4)
    exact = measure_noise(truth, [truth])
    assert measure_excess(truth, truth, exact) == (0.0, (0,))
    assert measure_excess(truth + 1e-6, truth, exact)[0] == math.inf
