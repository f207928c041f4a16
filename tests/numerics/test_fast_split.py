"""The fast split gives the bits of the plain one."""

import importlib.util
import os
import platform
import subprocess
import sys

import pytest
import torch

from floatline.numerics import compiled
from floatline.numerics.split import SPLIT_DTYPES as HALVES
from floatline.numerics.split import join_many, join_master, split_many, split_master, widen_many


@pytest.fixture(autouse=True, params=["torch", "numba"])
def way(request, monkeypatch):
    """In torch operations, and in loops that numba compiles."""
    monkeypatch.setattr(compiled, "COMPILED_FROM", 1 if request.param == "numba" else 1 << 60)
    if request.param == "numba" and compiled.split_loops() is None:
        pytest.skip("numba is not installed, or this processor does not convert float16")
    return request.param


def numbers(limit):
    """Every exponent with random mantissas, every float16 tie with both neighbours, zeros."""
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.randint(0, 1 << 23, (255, 200), generator=generator)
    every = ((torch.arange(255).unsqueeze(1) << 23) | mantissas).to(torch.int32).view(torch.float32).flatten()
    halves = torch.arange(0x7C00).to(torch.int16).view(torch.float16).float()
    ties = (halves[:-1] + halves[1:]) / 2
    below, above = torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(torch.inf))
    found = torch.cat([every, halves, ties, below, above, torch.zeros(1)])
    found = found[found < limit]
    return torch.cat([found, -found])


def assert_same(master, dtype):
    plain, fast = split_master(master, dtype), split_many(master, dtype)
    assert torch.equal(plain[0].view(torch.int16), fast[0].view(torch.int16))
    assert torch.equal(plain[1], fast[1])
    assert torch.equal(join_master(*plain).view(torch.int32), join_many(*fast).view(torch.int32))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 65520.0), (torch.bfloat16, torch.inf)])
def test_finite_numbers_split_as_in_numerics(dtype, limit):
    assert_same(numbers(limit), dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("special", [torch.inf, -torch.inf, 65520.0, -1e30, 3.4e38])
def test_special_numbers_split_as_in_numerics(dtype, special):
    assert_same(torch.tensor([1.5, special, -0.0, 1e-8]), dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_nan_stays_nan(dtype):
    weight, remainder = split_many(torch.tensor([1.0, torch.nan]), dtype)
    assert weight.isnan().tolist() == [False, True]
    assert join_many(weight, remainder).isnan().tolist() == [False, True]


def test_nothing_is_split_into_nothing():
    for dtype in HALVES:
        weight, remainder = split_many(torch.zeros(0), dtype)
        assert weight.shape == remainder.shape == (0,)


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_beyond_the_format_split_and_join_as_in_numerics(dtype):
    assert_same(numbers(torch.inf), dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_several_threads_split_as_one_does(dtype, monkeypatch):
    monkeypatch.setattr(compiled, "_SHARE", 1000)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same(numbers(torch.inf), dtype)
    finally:
        torch.set_num_threads(threads)


def test_the_loops_run_where_the_test_says_so(way, monkeypatch):
    runs = []
    run_loop = compiled.run_loop
    monkeypatch.setattr("floatline.numerics.split.run_loop", lambda *args: runs.append(1) or run_loop(*args))
    split_many(torch.ones(8), torch.float16)
    assert len(runs) == (way == "numba")


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_number_is_widened_as_torch_does(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert torch.equal(widen_many(every).nan_to_num(1e9), every.float().nan_to_num(1e9))
    assert torch.equal(widen_many(every).isnan(), every.isnan())


# Both sides of each half of float16's and of bfloat16's spacing, and what makes a NaN of an infinity.
LOW_HALVES = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x5A5A, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF]
EVERY_HALF = torch.arange(-(2**15), 2**15, dtype=torch.int32)


def assert_same_numbers(found, expected):
    """The same bits, of all but NaNs: torch's own have one sign or another."""
    whole = torch.int16 if found.element_size() == 2 else torch.int32
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found.view(whole)[~nan], expected.view(whole)[~nan])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_weight_joins_as_in_numerics(dtype):
    remainders = torch.tensor([-(2**15), 1 - 2**15, -12345, -1, 0, 1, 12345, 2**15 - 2, 2**15 - 1], dtype=torch.int16)
    weights = EVERY_HALF.to(torch.int16).view(dtype).repeat_interleave(len(remainders))
    remainders = remainders.repeat(len(EVERY_HALF))
    assert_same_numbers(join_many(weights, remainders), join_master(weights, remainders))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_high_half_of_a_master_splits_as_in_numerics(dtype):
    master = ((EVERY_HALF << 16).unsqueeze(1) | torch.tensor(LOW_HALVES, dtype=torch.int32)).view(torch.float32)
    (weight, remainder), expected = split_many(master, dtype), split_master(master, dtype)
    assert_same_numbers(weight, expected[0])
    assert torch.equal(remainder, expected[1])


@pytest.mark.parametrize(("bits", "flipped"), [(0x3C00, 1), (0, -(2**15)), (0x7C00, 1), (0x7E00, 0x0200)])
def test_the_comparison_of_numbers_can_fail(bits, flipped):
    """On a last bit, the sign of zero, a NaN instead of an infinity and an infinity instead of a NaN."""
    expected = EVERY_HALF.to(torch.int16)
    found = torch.where(expected == bits, expected ^ flipped, expected).to(torch.int16)
    with pytest.raises(AssertionError):
        assert_same_numbers(found.view(torch.float16), expected.view(torch.float16))


def test_a_loop_keeps_the_sign_and_the_high_bits_of_every_nan(way):
    if way == "torch":
        pytest.skip("torch's own NaNs have one sign or another")
    master = ((EVERY_HALF << 16).unsqueeze(1) | torch.tensor(LOW_HALVES, dtype=torch.int32)).view(torch.float32)
    nan = master[master.isnan()]
    high = (nan.view(torch.int32) >> 16).to(torch.int16)
    weight, remainder = split_many(nan, torch.bfloat16)
    assert torch.equal(weight.view(torch.int16), high | 0x0040)
    assert torch.equal(split_many(nan, torch.float16)[0].signbit(), high < 0)
    assert not remainder.any()


SPLIT_OF_MANY = """
import torch
from floatline.numerics.compiled import split_loops
from floatline.numerics.split import split_many
print(split_loops() is not None, split_many(torch.full((1 << 18,), 1.5), torch.float16)[0][0].item())
"""


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="every other processor has the instructions")
@pytest.mark.parametrize(("cpu", "looped"), [("generic", False), ("x86-64-v3", True)])
def test_code_for_a_processor_without_float16_has_no_loops(cpu, looped, way):
    """A loop would call a function at address 0 there."""
    if way == "torch":
        pytest.skip("the process decides")
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CPU_FEATURES"}
    done = subprocess.run(
        [sys.executable, "-c", SPLIT_OF_MANY],
        env={**environment, "NUMBA_CPU_NAME": cpu},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(looped), "1.5"]
