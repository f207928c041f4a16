"""Where the first inf or NaN came from states a size only of inputs that hold a finite number."""

import math

import pytest
import torch
from torch import nn

from floatline.precision.nonfinite import first_nonfinite


class Sum(nn.Module):
    """A module of two inputs, which makes inf."""

    def forward(self, x, mask):
        return (x + mask).sum() * math.inf


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.add = Sum()

    def forward(self, x, mask):
        return self.add(x, mask)


def place_of(model, *inputs):
    found = first_nonfinite(model, lambda: model(*inputs).mean())
    assert found is not None
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_inputs_without_a_finite_number_have_no_size(value):
    found = place_of(nn.Sequential(nn.Linear(3, 3)), torch.full((2, 3), value))
    assert math.isnan(found.largest_input)
    assert "up to" not in str(found)


@pytest.mark.parametrize("place", [0, 5])
def test_one_finite_number_is_told(place):
    given = torch.full((2, 3), math.nan)
    given.view(-1)[place] = -2.5
    assert str(place_of(nn.Sequential(nn.Linear(3, 3)), given)).endswith("; inputs up to 2.5")


def test_zeros_are_numbers():
    given = torch.tensor([[0.0, math.nan, 0.0]])
    assert str(place_of(nn.Sequential(nn.Linear(3, 3)), given)).endswith("; inputs up to 0")


@pytest.mark.parametrize("turned", [False, True])
def test_beside_a_mask_that_is_all_minus_inf_the_other_inputs_size_is_told(turned):
    inputs = (torch.ones(2, 3) * 7, torch.full((2, 3), -math.inf))
    assert place_of(Whole(), *(inputs[::-1] if turned else inputs)).largest_input == 7.0


def test_a_batch_of_nan_makes_a_line_without_a_size(capsys):
    import floatline as fl

    model = nn.Sequential(nn.Linear(3, 1))
    guard = fl.Guard(model, torch.optim.SGD(model.parameters(), 0.1), plan="fp32")
    for _ in range(10):
        guard.step(lambda x: model(x).mean(), torch.full((2, 3), math.nan))
    said = capsys.readouterr().err
    assert "first in 0 (Linear, float32): 0 inf and 2 NaN, given to it." in said
    assert "up to" not in said
