"""Ranges against the plain definition: cast every value and look."""

import math

import pytest
import torch

from floatline.errors import TensorError
from floatline.formats import BF16, E4M3FN, E5M2, E5M2FNUZ, FORMATS, FP16, FP32, find_format
from floatline.numerics.ranges import measure_ranges
from floatline.numerics.rounding import round_nearest

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
        ],
    ),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2fnuz]
AGAINST = list(FORMATS.values())


def by_definition(x: torch.Tensor, fmt) -> dict[str, float]:
    """The slow way: round each value and compare."""
    magnitudes = x.float().abs()
    finite = magnitudes.isfinite() & (magnitudes > 0)
    cast = round_nearest(magnitudes, fmt).abs()
    beyond = finite & (round_unbounded(magnitudes, fmt) > fmt.max)
    kept = finite & ~beyond
    error = (cast.double() - magnitudes.double()).abs() / magnitudes.double()
    return {
        "overflow": int(beyond.sum()),
        "to_zero": int((finite & (cast == 0)).sum()),
        "subnormal": int((kept & (cast > 0) & (cast < fmt.min_normal)).sum()),
        "relative_error": float(error[kept].mean()) if kept.any() else 0.0,
    }


def round_unbounded(magnitudes: torch.Tensor, fmt) -> torch.Tensor:
    """Nearest rounding as if the exponent had no upper end."""
    wide = magnitudes.double()
    spacing = torch.exp2((torch.frexp(wide).exponent - 1).clamp(min=fmt.min_exponent).double() - fmt.mantissa_bits)
    return torch.round(wide / spacing) * spacing


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)


def sample(dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize < 4:
        return every_pattern(dtype)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_003,), generator=generator).to(torch.int32)
    edges = [v for f in AGAINST for v in (f.max, f.overflow_at, f.zero_at, f.min_normal, f.min_normal - f.zero_at)]
    exact = torch.tensor(edges, dtype=torch.float64).float()
    around = [torch.nextafter(exact, torch.tensor(to)) for to in (math.inf, -math.inf)]
    return torch.cat(
        [bits.view(torch.float32), exact, *around, torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_figures_are_those_of_casting_every_value(dtype, device):
    x = sample(dtype)
    ranges = measure_ranges(x.to(device), *AGAINST)
    wide = x.float()
    assert ranges.count == x.numel()
    assert ranges.zeros == int((wide == 0).sum())
    assert ranges.infs == int(wide.isinf().sum())
    assert ranges.nans == int(wide.isnan().sum())
    finite = wide[wide.isfinite() & (wide != 0)].abs()
    assert (ranges.largest, ranges.smallest) == (finite.max().item(), finite.min().item())
    for fmt in AGAINST:
        fit, expected = ranges.against(fmt), by_definition(x, fmt)
        assert {"overflow": fit.overflow, "to_zero": fit.to_zero, "subnormal": fit.subnormal} == {
            key: expected[key] for key in ("overflow", "to_zero", "subnormal")
        }, fmt
        assert fit.relative_error == pytest.approx(expected["relative_error"], rel=1e-5, abs=1e-12), fmt


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exponents_are_those_of_log2(dtype, device):
    x = sample(dtype)
    wide = x.double().abs()
    wide = wide[wide.isfinite() & (wide > 0)]
    exponent = (torch.frexp(wide).exponent - 1).clamp(min=-127)
    expected = {int(e): int(n) for e, n in zip(*exponent.unique(return_counts=True), strict=True)}
    assert measure_ranges(x.to(device)).exponents == expected


@pytest.mark.parametrize("device", DEVICES)
def test_large_tensors_are_counted_whole(device):
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(3_000_001, generator=generator) * 1e-5).half()
    ranges = measure_ranges(x.to(device), FP16, E4M3FN)
    assert ranges.zeros == int((x == 0).sum())
    assert ranges.against("fp16").subnormal == int(((x != 0) & (x.abs() < FP16.min_normal)).sum())
    assert ranges.against(E4M3FN).to_zero == by_definition(x, E4M3FN)["to_zero"]
    assert sum(ranges.exponents.values()) == int((x != 0).sum())


@pytest.mark.parametrize("device", DEVICES)
def test_strided_unaligned_and_scalar_tensors(device):
    x = torch.randn(33, 40, generator=torch.Generator().manual_seed(2)).to(device)
    for view in (x.T, x[::2, 3:], x.flatten()[1:], x[0, 0], x.expand(2, 33, 40)):
        assert measure_ranges(view).largest == view.abs().max().item()
        assert measure_ranges(view.half()).largest == view.half().abs().max().item()
        assert measure_ranges(view).count == view.numel()


def test_values_beyond_float32_are_counted_in_float64():
    x = torch.tensor([1e300, 1e-300, 1.0, 0.0], dtype=torch.float64)
    ranges = measure_ranges(x, FP32)
    assert (ranges.infs, ranges.zeros, ranges.largest) == (0, 1, 1e300)
    assert (ranges.against("fp32").overflow, ranges.against("fp32").to_zero) == (1, 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_empty_tensors_have_empty_figures(dtype):
    ranges = measure_ranges(torch.empty(0, 3).to(dtype), FP16)
    assert (ranges.count, ranges.zeros, ranges.largest, ranges.smallest) == (0, 0, 0.0, math.inf)
    assert ranges.against(FP16).relative_error == 0
    assert ranges.exponents == {}


def test_a_tensor_is_held_against_its_own_format_by_default():
    for dtype in DTYPES:
        assert measure_ranges(torch.ones(3).to(dtype)).formats == (find_format(dtype),)
    assert measure_ranges(torch.ones(3).double()).formats == (FP32,)


def test_only_zeros_and_only_nans():
    assert measure_ranges(torch.zeros(5)).smallest == math.inf
    ranges = measure_ranges(torch.full((4,), math.nan).half(), FP16)
    assert (ranges.nans, ranges.num_nonzero, ranges.largest) == (4, 0, 0.0)
    assert "no finite value but 0" in str(ranges)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(
    ("values", "largest", "smallest"),
    [
        ([0.0, -0.0], 0.0, math.inf),
        ([math.inf, -math.inf], 0.0, math.inf),
        ([0.0, math.nan], 0.0, math.inf),
        ([0.0, math.inf, math.nan, -0.5], 0.5, 0.5),
        ([-2.0, 0.25, math.nan], 2.0, 0.25),
    ],
    ids=["zeros", "infs", "zero and NaN", "one number among them", "two numbers"],
)
def test_magnitudes_are_those_of_finite_numbers_alone(values, largest, smallest, dtype, device):
    ranges = measure_ranges(torch.tensor(values, device=device).to(dtype))
    assert (ranges.largest, ranges.smallest) == (largest, smallest)


def test_ranges_of_two_tensors_add_up():
    a, b = torch.randn(1000) * 1e-8, torch.randn(500) * 1e5
    both = measure_ranges(a, FP16, BF16) + measure_ranges(b, FP16, BF16)
    whole = measure_ranges(torch.cat([a, b]), FP16, BF16)
    assert both.exponents == whole.exponents
    assert (both.largest, both.smallest, both.count) == (whole.largest, whole.smallest, whole.count)
    for fmt in (FP16, BF16):
        assert both.against(fmt).to_zero == whole.against(fmt).to_zero
        assert both.against(fmt).relative_error == pytest.approx(whole.against(fmt).relative_error)
    with pytest.raises(TensorError, match="different formats"):
        measure_ranges(a, FP16) + measure_ranges(b, E5M2)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, dtype=torch.complex64), "torch.view_as_real"),
        (torch.ones(2, dtype=torch.int32), "or x.float()"),
        (torch.ones(2, 2).to_sparse(), "x.to_dense()"),
        ([1.0], "Pass a torch tensor"),
    ],
    ids=["complex", "int", "sparse", "list"],
)
def test_what_cannot_be_measured_is_refused_with_what_to_do(x, message):
    with pytest.raises(TensorError, match=message.replace("(", r"\(").replace(")", r"\)")):
        measure_ranges(x)


def test_a_format_that_was_not_measured_is_refused():
    with pytest.raises(TensorError, match="'fp16' was not measured. Measured: bf16"):
        measure_ranges(torch.ones(2), "bf16").against("fp16")


def test_a_gradient_tensor_needs_no_detaching():
    x = torch.randn(4, requires_grad=True)
    assert measure_ranges(x).count == 4
    assert measure_ranges(x * 2).count == 4


def test_people_get_a_few_lines():
    text = str(measure_ranges(torch.tensor([1e-9, 3e-6, 0.5, 7e4, math.inf]), "fp16", E5M2FNUZ))
    assert text.splitlines()[0] == "5 values of float32: 0 zero, 1 inf, 0 NaN"
    assert "in fp16: 1 overflow, 1 become zero, 1 subnormal" in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_measuring_on_a_gpu_does_not_wait_for_it(dtype):
    x = torch.randn(1000, device="cuda").to(dtype)
    measure_ranges(x, "fp16", "bf16")
    torch.cuda.set_sync_debug_mode("error")
    try:
        measured = measure_ranges(x, "fp16", "bf16")
        with pytest.raises(RuntimeError, match="synchroniz"):
            _ = measured.zeros
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_dtensor_is_measured_by_its_local_shard(tmp_path):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.tensor([1e-9, 1.0, 7e4]), init_device_mesh("cpu", (1,)), [Shard(0)])
        measured = measure_ranges(sharded, "fp16")
        assert (measured.count, measured.against("fp16").overflow) == (3, 1)
    finally:
        distributed.destroy_process_group()
