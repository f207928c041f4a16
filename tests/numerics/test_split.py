"""The exact split: join(split(x)) is x, bit for bit, wherever the format allows it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floatline.errors import TensorError
from floatline.numerics.split import SPLIT_DTYPES, join_master, split_master


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def every_exponent(per_exponent: int = 2000) -> torch.Tensor:
    """Random mantissas, and the hardest ones, under every sign and exponent of float32."""
    generator = torch.Generator().manual_seed(0)
    mantissa = torch.randint(0, 1 << 23, (per_exponent,), generator=generator)
    hard = torch.tensor([0, 1, 2, 0x7FFFFF, 0x7FFFFE, 0x400000, 0x1000, 0x0FFF, 0x1001, 0x8000, 0x7FFF, 0x8001, 0xFFFF])
    mantissa = torch.cat([mantissa, hard])
    exponent = torch.arange(0, 255)[:, None] << 23
    positive = (exponent + mantissa).flatten().to(torch.int32).view(torch.float32)
    return torch.cat([positive, -positive])


def half_ties() -> torch.Tensor:
    """All midpoints between neighbouring finite float16 numbers of one sign, and their mirror images."""
    grid = torch.arange(0, 0x7C00, dtype=torch.int16).view(torch.float16).double()
    ties = ((grid[1:] + grid[:-1]) / 2).float()
    return torch.cat([ties, -ties])


def test_bfloat16_is_exact_for_every_exponent():
    x = every_exponent()
    assert torch.equal(bits(join_master(*split_master(x, torch.bfloat16))), bits(x))


def test_float16_is_exact_from_two_to_the_minus_17_up():
    x = every_exponent()
    x = x[(x.abs() >= 2.0**-17) & (x.abs() < 65520)]
    assert x.numel() > 60_000
    assert torch.equal(bits(join_master(*split_master(x, torch.float16))), bits(x))


def test_float16_is_within_2_to_the_minus_41_below_and_the_bound_is_reached():
    x = every_exponent()
    x = x[x.abs() < 2.0**-17]
    error = (join_master(*split_master(x, torch.float16)).double() - x.double()).abs()
    assert error.max() <= 2.0**-41
    assert error.max() > 2.0**-42


def test_every_float16_tie_is_exact():
    ties = half_ties()
    exact = ties[ties.abs() >= 2.0**-17]
    assert (ties > 0).sum() == 0x7C00 - 1
    weight, remainder = split_master(exact, torch.float16)
    assert torch.equal(bits(join_master(weight, remainder)), bits(exact))
    assert weight.isfinite().all()


def test_a_naive_split_would_fail_on_the_ties():
    ties = half_ties()
    spare = (ties - ties.half().float()) / (
        torch.nextafter(ties.half().abs(), torch.tensor(torch.inf).half()).float() - ties.half().abs().float()
    )
    assert (spare * 65536 > 32767).any()  # one more than int16 can hold


def test_the_weight_is_the_nearest_sixteen_bit_number():
    x = every_exponent(200)
    for dtype in SPLIT_DTYPES:
        weight, _ = split_master(x, dtype)
        nearest = x.to(dtype)
        differs = (weight != nearest) & nearest.isfinite()
        extra = (weight.double() - x.double()).abs() - (nearest.double() - x.double()).abs()
        exact = (x.abs() >= 2.0**-17) | (dtype == torch.bfloat16)
        assert (extra[differs & exact] == 0).all()  # they differ on ties only
        assert (extra[differs & ~exact] <= 2.0**-40).all()


@pytest.mark.parametrize("dtype", SPLIT_DTYPES, ids=str)
def test_infinity_nan_and_negative_zero_are_defined(dtype):
    nan_patterns = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x400000], dtype=torch.int32).view(
        torch.float32
    )
    special = torch.cat([torch.tensor([math.inf, -math.inf, 0.0, -0.0]), nan_patterns])
    weight, remainder = split_master(special, dtype)
    joined = join_master(weight, remainder)
    assert torch.equal(bits(joined[:4]), bits(special[:4]))
    assert weight[:2].isinf().all()
    assert weight[4:].isnan().all()
    assert joined[4:].isnan().all()
    assert (remainder == 0).all()


def test_float16_masters_beyond_the_range_are_infinite():
    weight, remainder = split_master(torch.tensor([65519.996, 65520.0, -1e9]), torch.float16)
    assert weight.tolist() == [65504.0, math.inf, -math.inf]
    assert join_master(weight, remainder).tolist() == [65519.99609375, math.inf, -math.inf]


def test_bfloat16_holds_masters_whose_weight_overflows():
    top = torch.finfo(torch.float32).max
    weight, remainder = split_master(torch.tensor([top, -top]), torch.bfloat16)
    assert weight.isinf().all()
    assert join_master(weight, remainder).tolist() == [top, -top]


@given(st.floats(width=32, allow_nan=False))
def test_any_float32_survives_bfloat16(value):
    x = torch.tensor([value])
    assert torch.equal(bits(join_master(*split_master(x, torch.bfloat16))), bits(x))


@given(st.floats(min_value=-65519, max_value=65519, width=32))
def test_any_float32_in_range_survives_float16_within_the_bound(value):
    x = torch.tensor([value])
    back = join_master(*split_master(x, torch.float16))
    assert abs(back.double().item() - value) <= (0 if abs(value) >= 2.0**-17 else 2.0**-41)


def test_wrong_dtypes_are_refused_with_what_to_do():
    with pytest.raises(TensorError, match="torch.float32 first"):
        split_master(torch.ones(2).double(), torch.float16)
    with pytest.raises(TensorError, match="Use torch.float16 or torch.bfloat16"):
        split_master(torch.ones(2), torch.float8_e5m2)
    with pytest.raises(TensorError, match="Use torch.float16 or torch.bfloat16"):
        join_master(torch.ones(2), torch.zeros(2, dtype=torch.int16))


def test_strided_and_empty_tensors_split():
    x = torch.randn(6, 8)[::2, ::3]
    for dtype in SPLIT_DTYPES:
        assert torch.equal(join_master(*split_master(x, dtype)), x)
        assert join_master(*split_master(torch.empty(0, 2), dtype)).shape == (0, 2)
