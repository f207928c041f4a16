"""Two ways to count bit patterns on a CPU, one result."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.slow import slow

from floatline.numerics.ranges import measure_ranges
from floatline.numerics.tally import tally_cpu
from floatline.numerics.tally.tally_cpu import compiled_loop, count_by_torch, count_compiled, pattern_counts

DTYPES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
NEEDS_NUMBA = pytest.mark.skipif(compiled_loop() is None, reason="numba is not installed")


def every_pattern(dtype: torch.dtype, *, num_times: int = 1) -> torch.Tensor:
    bits = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    return bits.repeat(num_times).to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype)


def random_patterns(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Some patterns far more often than others."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3e-2
    return values.relu().to(dtype)


@NEEDS_NUMBA
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pattern_is_counted_once_by_both_ways(dtype):
    x = every_pattern(dtype)
    by_torch, compiled = count_by_torch(x), count_compiled(x, compiled_loop())
    assert compiled.dtype == by_torch.dtype == torch.int64
    assert torch.equal(compiled, by_torch)
    assert set(compiled.tolist()) == {2 if dtype.itemsize == 2 else 1}


@NEEDS_NUMBA
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 1000, 2_000_003])
def test_both_ways_agree_at_every_length(dtype, count):
    x = random_patterns(dtype, count)
    assert torch.equal(count_compiled(x, compiled_loop()), count_by_torch(x))


@NEEDS_NUMBA
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", range(9))
def test_a_view_may_begin_inside_a_word(dtype, first):
    whole = random_patterns(dtype, 4099)
    for x in (whole[first:], whole[first : first + 3], whole[first:-1]):
        assert torch.equal(count_compiled(x, compiled_loop()), count_by_torch(x))


@NEEDS_NUMBA
@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_the_number_of_threads_changes_nothing(num_threads):
    x = every_pattern(torch.float16, num_times=3)[5:]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(count_compiled(x, compiled_loop()), count_by_torch(x))
    finally:
        torch.set_num_threads(before)


@NEEDS_NUMBA
def test_parts_are_small_enough_for_32_bit_counters(monkeypatch):
    assert np.iinfo(np.uint32).max >= 2 * tally_cpu._MOST_WORDS
    sizes = []

    def loop(words, mask, table):
        sizes.append(words.size)

    monkeypatch.setattr(tally_cpu, "_MOST_WORDS", 100)
    count_compiled(torch.zeros(4 * 950, dtype=torch.float16), loop)
    assert sum(sizes) == 950
    assert max(sizes) <= 100


@NEEDS_NUMBA
def test_a_loop_that_misses_a_value_would_be_found():
    loop = compiled_loop()

    def careless(words, mask, table):
        loop(words[1:], mask, table)

    x = random_patterns(torch.float16, 1000)
    assert not torch.equal(count_compiled(x, careless), count_by_torch(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_figures_are_bit_identical_by_both_ways(dtype, monkeypatch):
    """Strided, unaligned, empty and single values included, as `measure_ranges` takes them."""
    base = random_patterns(dtype, 3 * 4097).view(3, 4097)
    base.view(-1)[:256] = every_pattern(dtype)[:256]
    for x in (base, base.T, base[:, ::2], base[1:, 3:], base[0, 0], base[:0], base.expand(2, 3, 4097)):
        figures = []
        for large in (1 << 60, 0):
            monkeypatch.setattr(tally_cpu, "_LARGE", large)
            measured = measure_ranges(x, "fp16", "bf16", "fp8_e4m3fn")
            figures.append((measured._counts, measured._magnitudes, measured._errors))
        assert figures[0] == figures[1]


@NEEDS_NUMBA
def test_only_large_tensors_take_the_compiled_way(monkeypatch):
    taken = []
    monkeypatch.setattr(tally_cpu, "_LARGE", 1000)
    monkeypatch.setattr(tally_cpu, "count_compiled", lambda flat, loop: taken.append(flat.numel()))
    pattern_counts(torch.ones(999, dtype=torch.float16))
    assert taken == []
    pattern_counts(torch.ones(1000, dtype=torch.float16))
    assert taken == [1000]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


MEASURE = """
import sys, torch
from floatline.numerics.tally import tally_cpu
from floatline.numerics.ranges import measure_ranges
tally_cpu._LARGE = {large}
print(measure_ranges(torch.ones(5000, dtype=torch.float16)).exponents, "numba" in sys.modules)
"""


@slow
def test_small_tensors_do_not_load_numba():
    assert python(MEASURE.format(large=5001)) == "{0: 5000} False"


@slow
@NEEDS_NUMBA
def test_the_check_above_can_fail():
    assert python(MEASURE.format(large=5000)) == "{0: 5000} True"


@pytest.fixture
def fresh_loop(monkeypatch):
    """`compiled_loop` as if it had not been called yet; every tensor is large."""
    monkeypatch.setattr(tally_cpu, "compiled_loop", compiled_loop.__wrapped__)
    monkeypatch.setattr(tally_cpu, "_LARGE", 0)


def test_without_numba_torch_counts(fresh_loop, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # its import raises ImportError
    assert tally_cpu.compiled_loop() is None
    assert measure_ranges(torch.ones(5000, dtype=torch.float16)).exponents == {0: 5000}


@NEEDS_NUMBA
def test_where_numba_must_not_compile_torch_counts(fresh_loop, monkeypatch):
    import numba

    assert tally_cpu.compiled_loop() is not None
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert tally_cpu.compiled_loop() is None
    assert measure_ranges(torch.ones(5000, dtype=torch.float16)).exponents == {0: 5000}
