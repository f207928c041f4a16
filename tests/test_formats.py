"""Formats against torch and ml_dtypes, over every bit pattern of the 16-, 8-, 6- and 4-bit ones."""

import math
import struct
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch

from floatline.errors import FormatError
from floatline.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FORMATS,
    FP16,
    FP32,
    TF32,
    find_format,
)

TORCH = {
    FP16: (torch.float16, torch.uint16),
    BF16: (torch.bfloat16, torch.uint16),
    E4M3FN: (torch.float8_e4m3fn, torch.uint8),
    E5M2: (torch.float8_e5m2, torch.uint8),
    E4M3FNUZ: (torch.float8_e4m3fnuz, torch.uint8),
    E5M2FNUZ: (torch.float8_e5m2fnuz, torch.uint8),
}
ML_DTYPES = {
    BF16: ml_dtypes.bfloat16,
    E4M3FN: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E2M1: ml_dtypes.float4_e2m1fn,
}


def decoded(fmt) -> np.ndarray:
    return np.array([fmt.decode(pattern) for pattern in range(2**fmt.bits)])


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(ours, theirs)  # NaN equals NaN here
    numbers = ~np.isnan(ours)
    np.testing.assert_array_equal(np.signbit(ours)[numbers], np.signbit(theirs)[numbers])


@pytest.mark.parametrize("fmt", TORCH, ids=lambda f: f.name)
def test_every_pattern_is_the_number_torch_reads(fmt):
    dtype, carrier = TORCH[fmt]
    patterns = torch.arange(2**fmt.bits, dtype=torch.int32).to(carrier)
    assert_same(decoded(fmt), patterns.view(dtype).double().numpy())


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=lambda f: f.name)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_every_pattern_is_the_number_ml_dtypes_reads(fmt):
    carrier = np.uint16 if fmt.bits == 16 else np.uint8
    patterns = np.arange(2**fmt.bits).astype(carrier)
    assert_same(decoded(fmt), patterns.view(ML_DTYPES[fmt]).astype(np.float64))


def test_a_wrong_bias_would_be_caught():
    wrong = type(E4M3FN)("wrong", 4, 3, "fnuz")
    with pytest.raises(AssertionError):
        assert_same(decoded(wrong), decoded(E4M3FN))


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.bits <= 16], ids=lambda f: f.name)
def test_the_derived_facts_follow_from_the_patterns(fmt):
    values = decoded(fmt)
    finite = np.unique(values[np.isfinite(values)])
    positive = finite[finite > 0]
    assert fmt.max == positive[-1]
    assert fmt.min_subnormal == positive[0]
    assert fmt.has_inf == bool(np.isinf(values).any())
    assert fmt.has_nan == bool(np.isnan(values).any())
    integers = set(finite[finite == np.round(finite)])
    assert all(n in integers for n in range(fmt.max_exact_integer + 1))
    assert fmt.max_exact_integer + 1 not in integers
    for value, after in pairwise(positive):
        assert fmt.spacing(value) == after - value
    full_mantissa = [v for v in positive if fmt.spacing(v) <= v * 2.0**-fmt.mantissa_bits]
    assert fmt.min_normal == full_mantissa[0]


@pytest.mark.parametrize("fmt", TORCH, ids=lambda f: f.name)
def test_facts_agree_with_finfo(fmt):
    info = torch.finfo(TORCH[fmt][0])
    assert (fmt.max, fmt.min_normal) == (info.max, info.smallest_normal)
    # finfo's eps of float8_e5m2fnuz is 0.125 in torch 2.13, though torch itself has no number between 1 and 1.25.
    if fmt is not E5M2FNUZ:
        assert fmt.epsilon == info.eps


def test_fp32_facts_agree_with_torch_and_with_its_bits():
    info = torch.finfo(torch.float32)
    assert (FP32.max, FP32.min_normal, FP32.epsilon, FP32.bits) == (info.max, info.smallest_normal, info.eps, 32)
    assert FP32.min_subnormal == struct.unpack("<f", struct.pack("<I", 1))[0]
    rng = np.random.default_rng(0)
    for pattern in [0, 1, 0x7F800000, 0xFF800000, 0x80000000, 0x7F7FFFFF, *rng.integers(0, 2**32, 5000)]:
        value = struct.unpack("<f", struct.pack("<I", int(pattern)))[0]
        ours = FP32.decode(int(pattern))
        assert ours == value or (math.isnan(ours) and math.isnan(value))
    assert FP32.max_exact_integer == 2**24
    assert FP32.digits == 6


def test_tf32_has_the_range_of_fp32_and_the_mantissa_of_fp16():
    assert (TF32.bits, TF32.min_normal, TF32.epsilon) == (19, FP32.min_normal, FP16.epsilon)
    assert FP32.max * (1 - TF32.epsilon) < TF32.max < FP32.max


def test_the_numbers_engineers_know():
    assert (FP16.max, FP16.min_normal, FP16.max_exact_integer, FP16.digits) == (65504, 2**-14, 2048, 3)
    assert (BF16.max_exact_integer, BF16.digits) == (256, 2)
    assert (E4M3FN.max, E5M2.max, E4M3FNUZ.max, E2M1.max, E3M2.max, E2M3.max) == (448, 57344, 240, 6, 28, 7.5)
    assert FP16.overflow_at == 65520
    assert FP16.zero_at == 2.0**-25


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=lambda f: f.name)
def test_rounding_thresholds_are_where_torch_rounds(fmt):
    dtype = TORCH[fmt][0]
    for threshold, below, at in [(fmt.zero_at, 0.0, 0.0), (fmt.overflow_at, fmt.max, math.inf)]:
        x = torch.tensor([threshold], dtype=torch.float64).float()
        assert x.to(dtype).double().item() == at
        down = torch.nextafter(x, torch.zeros(1))
        assert down.to(dtype).double().item() == below
    above = torch.nextafter(torch.tensor([fmt.zero_at]), torch.ones(1))
    assert above.to(dtype).double().item() == fmt.min_subnormal


def test_spacing_beyond_the_range_and_at_nan():
    assert FP16.spacing(65505) == math.inf
    assert math.isnan(FP16.spacing(math.nan))
    assert FP16.spacing(0) == FP16.min_subnormal
    assert FP16.spacing(-1.5) == FP16.epsilon


def test_a_pattern_that_does_not_fit_is_refused():
    with pytest.raises(FormatError, match="Use 0 to 255"):
        E5M2.decode(256)


@pytest.mark.parametrize("name", ["fp16", "half", "float16", "torch.float16", "FP16", torch.float16, FP16])
def test_a_format_is_found_by_any_of_its_names(name):
    assert find_format(name) is FP16


@pytest.mark.parametrize("fmt", TORCH, ids=lambda f: f.name)
def test_torch_dtypes_name_their_format(fmt):
    assert find_format(TORCH[fmt][0]) is fmt


def test_no_two_formats_share_a_name():
    names = [name for fmt in FORMATS.values() for name in (fmt.name, *fmt.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8", "Format 'fp8' is ambiguous. Use 'fp8_e5m2' (max 57344) or 'fp8_e4m3fn' (max 448)."),
        ("fp6", "Format 'fp6' is ambiguous. Use 'fp6_e3m2' (max 28) or 'fp6_e2m3' (max 7.5)."),
        ("fp17", "Format 'fp17' is not known. Did you mean 'fp16'"),
        ("posit", "Format 'posit' is not known. Known: fp32, tf32, bf16, fp16"),
    ],
)
def test_a_name_that_does_not_decide_is_refused_with_the_choices(name, message):
    with pytest.raises(FormatError) as error:
        find_format(name)
    assert str(error.value).startswith(message)


def test_a_format_prints_its_layout_and_range():
    assert str(FP16) == "fp16 (1+5+10 bits, 5.96e-08 to 65504)"
