"""What rounding explains: measured, and not excused by roundings that a side makes without need."""

import pytest
import torch
from torch import nn

from floatline.agreement.measuring import measure_pair
from floatline.agreement.reading import FARTHER, WRONG, Reading
from floatline.agreement.sides import Given, Side, find_unrounded
from floatline.numerics import HalfOnCPU


def excess_of(function, x):
    side = Side.of(function)
    with HalfOnCPU():
        return measure_pair(side, side, Given.of(x), backward=False).readings[0].excess_a


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_right_computations_are_about_as_far_off_as_rounding_explains(dtype, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8), nn.Softmax(-1)).to(dtype)
    assert 0.3 < excess_of(model, torch.randn(16, 32).to(dtype)) < 4


def test_needless_roundings_are_no_excuse():
    def once(x):
        return (x.float() * 1.37).tanh().to(x.dtype)

    def often(x):
        for _ in range(40):
            x = x * 1.013
        return (x * (1.37 / 1.013**40)).tanh()

    torch.manual_seed(0)
    reading = measure_pair(Side.of(once), Side.of(often), Given.of(torch.randn(500).bfloat16())).readings[0]
    assert (reading.verdict, reading.side) == ("farther", "B") or reading.verdict == "wrong"
    assert excess_of(often, torch.randn(500).bfloat16()) < 2  # with itself alone it would be


def make_reading(**changes):
    usual = {"apart": 1e-3, "a": 1e-3, "b": 1e-3, "floor": 1e-7, "functions": 0.0}
    usual |= {"excess_a": 1.0, "excess_b": 1.0, "excess_apart": 1.0}
    return Reading("output", "forward", **(usual | changes))


@pytest.mark.parametrize(
    ("changes", "verdict", "side"),
    [
        ({}, "agree", ""),
        ({"b": 3e-3, "excess_b": 3.0}, "farther", "B"),
        ({"a": 3e-3, "excess_a": 3.0}, "farther", "A"),
        ({"b": 9e-3, "excess_b": WRONG + 1}, "wrong", "B"),
        ({"excess_a": float("nan")}, "wrong", "A"),
        ({"excess_a": 20.0, "excess_b": 20.0, "excess_apart": 20.0}, "wrong", "both"),
        ({"excess_a": 20.0, "excess_b": 20.0, "excess_apart": 0.0}, "agree", ""),
        ({"functions": 1e-5}, "other-function", "B"),
        ({"b": 0.9e-7, "a": 1e-8, "excess_b": 20.0}, "agree", ""),  # below FP32's own
        ({"functions": 0.9e-7}, "agree", ""),
        ({"a": 1e-7, "b": 1e-3}, "agree", ""),  # FP32 and BF16
        ({"a": 1e-7, "b": 1e-3, "excess_a": 1 + FARTHER}, "agree", ""),
        ({"b": 1.4e-3, "excess_b": 1.4, "excess_a": 0.3}, "agree", ""),
    ],
)
def test_the_verdict_follows_from_the_numbers(changes, verdict, side):
    reading = make_reading(**changes)
    assert (reading.verdict, reading.side) == (verdict, side)


def test_weights_that_are_rounded_copies_mean_what_the_full_ones_mean():
    full = nn.Linear(8, 4)
    rounded = nn.Linear(8, 4)
    rounded.load_state_dict(full.state_dict())
    rounded.bfloat16()
    assert set(find_unrounded(Side.of(full), Side.of(rounded))) == {"weight", "bias"}
    with torch.no_grad():
        rounded.bias[0] += 1
    assert set(find_unrounded(Side.of(rounded), Side.of(full))) == {"weight"}
