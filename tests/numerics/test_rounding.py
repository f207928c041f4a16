"""Rounding against torch, ml_dtypes and the definition, over every pattern where there are few."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floatline.errors import TensorError
from floatline.formats import BF16, E2M1, E2M3, E3M2, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FORMATS, FP16, FP32, TF32
from floatline.numerics.rounding import round_nearest, round_stochastic

NATIVE = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E4M3FNUZ: torch.float8_e4m3fnuz,
    E5M2FNUZ: torch.float8_e5m2fnuz,
}
ML_DTYPES = {
    FP16: np.float16,
    BF16: ml_dtypes.bfloat16,
    E4M3FN: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E2M1: ml_dtypes.float4_e2m1fn,
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, any NaN being as good as another."""
    a, b = a.float(), b.float()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def values(fmt) -> torch.Tensor:
    decoded = torch.tensor([fmt.decode(p) for p in range(2**fmt.bits)], dtype=torch.float64)
    return decoded[decoded.isfinite()].unique()


def hard_cases(fmt) -> torch.Tensor:
    """Every number of the format, every tie, and the float32 neighbours of both."""
    grid = values(fmt)
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([fmt.overflow_at, -fmt.overflow_at])])
    exact = points.float()
    assert torch.equal(exact.double(), points)
    up = torch.nextafter(exact, torch.tensor(math.inf))
    down = torch.nextafter(exact, torch.tensor(-math.inf))
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45, -1e-45])
    return torch.cat([exact, up, down, special])


def random_floats(count: int = 200_000) -> torch.Tensor:
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0))
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("fmt", NATIVE, ids=str)
def test_nearest_agrees_with_torch_on_every_number_tie_and_neighbour(fmt):
    for x in (hard_cases(fmt), random_floats()):
        if not fmt.has_inf:
            x = x[x.abs() <= fmt.max]  # beyond it torch saturates or not, depending on its version
        assert same(round_nearest(x, fmt), x.to(NATIVE[fmt]))


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nearest_agrees_with_ml_dtypes_beyond_the_range_too(fmt):
    for x in (hard_cases(fmt), random_floats()):
        if not fmt.has_nan:
            x = x[~x.isnan()]
        expected = torch.from_numpy(x.numpy().astype(ML_DTYPES[fmt]).astype(np.float32))
        assert same(round_nearest(x, fmt), expected)


def test_nearest_to_fp32_changes_nothing():
    x = random_floats()
    assert same(round_nearest(x, FP32), x)


def test_nearest_to_tf32_keeps_ten_mantissa_bits():
    x = random_floats()
    rounded = round_nearest(x, TF32)
    finite = rounded.isfinite()
    assert ((rounded[finite].view(torch.int32) & 0x1FFF) == 0).all()
    normal = finite & (x.abs() > TF32.min_normal)
    assert ((rounded - x).abs()[normal] <= x.abs()[normal] * 2.0**-11).all()


def test_nearest_agrees_with_the_scalar_definition():
    x = hard_cases(E4M3FN)
    for value, rounded in zip(x.tolist(), round_nearest(x, E4M3FN).tolist(), strict=True):
        expected = E4M3FN.round(value)
        assert rounded == expected or (math.isnan(rounded) and math.isnan(expected))


def test_a_rounder_that_breaks_ties_upwards_would_be_caught():
    x = hard_cases(FP16)
    half_up = torch.copysign((x.abs() / 2.0**-24 + 0.5).floor() * 2.0**-24, x)  # wrong on subnormal ties
    subnormal = x.abs() < FP16.min_normal
    assert not same(half_up[subnormal], x.to(torch.float16)[subnormal])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_stochastic_returns_one_of_the_two_neighbours(fmt):
    x = random_floats(20_000)
    x = x[x.abs() <= fmt.max]
    x = torch.cat([x, torch.linspace(-1, 1, 1001) * min(fmt.max, 2.0)])
    rounded = round_stochastic(x, fmt, seed=1)
    assert same(round_nearest(rounded, fmt), rounded)
    spacing = torch.tensor([fmt.spacing(v) for v in x.tolist()])
    assert ((rounded.double() - x.double()).abs() < spacing.double()).all()


@pytest.mark.parametrize("fmt", NATIVE, ids=str)
def test_stochastic_leaves_what_the_format_holds(fmt):
    x = values(fmt).float()
    assert same(round_stochastic(x, fmt, seed=3), x)
    negative_zero = round_stochastic(torch.tensor([-0.0]), fmt, seed=3)
    assert negative_zero.signbit().item() is (fmt.specials != "fnuz")
    assert round_stochastic(torch.tensor([math.nan]), fmt, seed=3).isnan().all()


@pytest.mark.parametrize(
    ("fmt", "value"),
    [(FP16, 1.0003), (FP16, 3e-8), (FP16, -(2.0**-30)), (BF16, 1.001), (BF16, -3.3e-39), (E4M3FN, 0.3), (E5M2, 100.1)],
    ids=str,
)
def test_stochastic_is_unbiased(fmt, value):
    count = 1 << 18
    exact = torch.tensor(value, dtype=torch.float32)
    rounded = round_stochastic(exact.expand(count), fmt, seed=5).double() / fmt.spacing(value)
    target = exact.double() / fmt.spacing(value)
    fraction = float(target - target.floor())
    error = abs(float(rounded.mean() - target))
    assert error <= 5 * math.sqrt(fraction * (1 - fraction) / count)


def test_rounding_to_nearest_fails_the_test_of_unbiasedness():
    rounded = round_nearest(torch.full((1000,), 1.0003), FP16)
    assert abs(rounded.double().mean().item() - 1.0003) > 2e-4


def test_stochastic_is_the_same_on_shards_and_after_a_resume():
    x = torch.randn(10, 37, generator=torch.Generator().manual_seed(0))
    whole = round_stochastic(x, BF16, seed=9, step=4, stream=2)
    assert torch.equal(round_stochastic(x, BF16, seed=9, step=4, stream=2), whole)
    shards = [round_stochastic(x[i : i + 3], BF16, seed=9, step=4, stream=2, start=37 * i) for i in range(0, 10, 3)]
    assert torch.equal(torch.cat(shards), whole)
    assert not torch.equal(round_stochastic(x, BF16, seed=9, step=5, stream=2), whole)


def test_steps_round_independently():
    x = torch.full((4096,), 1.0 + 2.0**-12)
    a, b = (round_stochastic(x, FP16, seed=1, step=step) > 1 for step in (1, 2))
    both = (a & b).double().mean().item()
    assert abs(both - 1 / 16) < 5 * math.sqrt(1 / 16 * 15 / 16 / 4096)


@given(st.floats(width=32), st.sampled_from(list(FORMATS.values())))
def test_nearest_is_the_scalar_rounding_for_any_float32(value, fmt):
    rounded = round_nearest(torch.tensor([value]), fmt).item()
    expected = fmt.round(value)
    assert (rounded == expected and math.copysign(1, rounded) == math.copysign(1, expected)) or (
        math.isnan(rounded) and math.isnan(expected)
    )


def test_float64_and_integers_are_refused():
    for dtype in (torch.float64, torch.int32, torch.complex64):
        with pytest.raises(TensorError, match="Convert it to torch.float32"):
            round_nearest(torch.ones(2, dtype=dtype), FP16)


def test_empty_and_strided_tensors_round():
    assert round_nearest(torch.empty(0, 3), FP16).shape == (0, 3)
    x = torch.randn(8, 6)[::2, 1::2]
    assert torch.equal(round_nearest(x, FP16), x.half().float())
    assert round_stochastic(x.T, FP16, seed=1).shape == (3, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_a_gpu_rounds_to_the_same_bits(fmt):
    x = torch.cat([hard_cases(fmt) if fmt.bits <= 16 else random_floats(1000), random_floats(50_000)])
    assert same(round_nearest(x.cuda(), fmt).cpu(), round_nearest(x, fmt))
    options = {"seed": 2**63 + 5, "step": 7, "stream": 3, "start": 1}
    assert same(round_stochastic(x.cuda(), fmt, **options).cpu(), round_stochastic(x, fmt, **options))
