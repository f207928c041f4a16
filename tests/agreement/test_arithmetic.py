"""Other arithmetic: a program all in a wide format, and one whose roundings are moved."""

import pytest
import torch
import torch.nn.functional as F

from floatline.agreement.arithmetic import Nudged, Widened


def narrow(x):
    return (x.bfloat16() * 3.1).to(torch.float16).float().sum(-1, dtype=torch.bfloat16)


def test_a_program_that_casts_to_16_bits_is_computed_in_full_when_widened():
    x = torch.randn(4, 32, dtype=torch.float64)
    with Widened(torch.float64):
        wide = narrow(x)
    assert wide.dtype == torch.float64
    assert torch.equal(wide, (x * 3.1).sum(-1))
    assert not torch.allclose(narrow(x).double(), wide, rtol=1e-4)  # as it is written


def test_autocast_is_widened_too():
    linear = torch.nn.Linear(8, 8).double()
    x = torch.randn(2, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16), Widened(torch.float64):
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize(("training", "drawn"), [(True, True), (False, False)])
def test_random_numbers_are_noticed(training, drawn):
    x = torch.randn(1, 1, 4, 8)
    with Widened(torch.float32) as mode:
        F.dropout(x, training=training)
        F.scaled_dot_product_attention(x, x, x)
    assert mode.random == drawn


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_rounded_number_is_moved_by_one_unit(dtype):
    x, y = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    plain = x * y
    with Nudged(1) as mode:
        moved = x * y
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    units = (moved.view(ints) - plain.view(ints)).abs()
    assert units[plain != 0].unique().tolist() == [1]
    assert mode.formats == {dtype}


def test_what_does_not_round_zeros_and_what_is_not_finite_stay():
    x = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 1.5], dtype=torch.float16)
    with Nudged(1):
        same, moved = torch.cat([x, x])[:6].clone(), x * 1.0
    assert torch.equal(same.nan_to_num(7.0), x.nan_to_num(7.0))
    assert torch.equal(moved[:4].nan_to_num(7.0), x[:4].nan_to_num(7.0))
    assert moved[4] < 65504  # the largest number goes down, not to inf
    assert moved[5] != 1.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits_moves_to_a_neighbour_or_stays(dtype):
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    x = bits.view(dtype)
    moved = x.clone()
    Nudged(1).move(moved)
    size, after = x.abs(), moved.view(torch.int16).int() - bits.int()
    largest = torch.finfo(dtype).max
    stays = (x == 0) | ~x.isfinite() | (size == torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    assert after[stays].unique().tolist() == [0]  # the smallest number has 0 beside it
    assert after[~stays].abs().unique().tolist() == [1] and moved[x.isfinite()].isfinite().all()
    assert (moved.abs() < size)[(size >= largest * (1 - 2**-7)) & x.isfinite()].all()
    assert 0.45 < (after[~stays] > 0).double().mean() < 0.55


def test_numbers_of_a_tensor_go_together_where_asked():
    x = torch.rand(1000) + 1
    with Nudged(2, together=True):
        moved = x * 1.5
    assert len((moved > x * 1.5).unique()) == 1
    with Nudged(2):
        moved = x * 1.5
    assert len((moved > x * 1.5).unique()) == 2


def test_units_of_bfloat16_are_those_of_float32_times_65536():
    x = torch.rand(100) / 2 + 1.25
    with Nudged(1, units=2**16):
        moved = x * 1.0
    assert torch.allclose((moved - x).abs(), torch.full((100,), 2.0**-7))
