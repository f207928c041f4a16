"""Figures of tensors: by hand, and the same on the CPU as on a device."""

import dataclasses
import math

import pytest
import torch
from tests.slow import mostly_slow

from floatline.probe.trace import measures as module
from floatline.probe.trace.measures import (
    Measures,
    RunningSum,
    _fill,
    _reduce_on_cpu,
    _to_numpy,
    count_stuck,
    reduce_on_device,
)
from floatline.probe.trace.trace import Values

CASES = {
    "plain": ([1.0, -2.0, 0.5], [1.0, -2.5, 0.5]),
    "zeros": ([0.0, 0.0, 3.0], [0.0, 1e-9, 3.0]),
    "all zero": ([0.0, 0.0], [0.0, 0.0]),
    "only the twin is zero": ([1.0], [0.0]),
    "infinite": ([math.inf, -math.inf, 1.0, math.nan], [7e4, -8e4, 1.0, math.nan]),
    "nothing finite": ([math.nan, math.inf], [math.inf, 2.0]),
    "tiny and large": ([1e-40, 3e38], [1e-40, 2e38]),
}


@pytest.mark.parametrize("name", CASES)
def test_both_ways_of_reducing_agree(name):
    x, twin = (torch.tensor(values) for values in CASES[name])
    for other in (twin, None):
        counts, sizes = _reduce_on_cpu(_to_numpy(x), None if other is None else _to_numpy(other))
        device_counts, device_sizes = reduce_on_device(x, other)
        assert counts == device_counts.tolist()
        assert sizes == pytest.approx(device_sizes.tolist(), rel=1e-6)


def test_the_figures_are_those_counted_by_hand():
    x, twin = (torch.tensor(values) for values in CASES["infinite"])
    value = Measures().measure(x, twin, exact=False)
    assert (value.pos_inf, value.neg_inf, value.nan, value.nonfinite, value.zeros) == (1, 1, 1, 3, 0)
    assert (value.largest, value.smallest, value.twin_largest) == (1.0, 1.0, 8e4)
    assert (value.twin_nonfinite, value.blown, value.lost, value.error) == (1, 2, 0, 0.0)
    x, twin = (torch.tensor(values) for values in CASES["plain"])
    assert Measures().measure(x, twin, exact=False).error == pytest.approx(0.5 / math.sqrt(7.5))


def test_a_tensor_that_is_its_own_twin_has_no_error():
    value = Measures().measure(torch.tensor([1.0, math.inf]), None, exact=True)
    assert (value.error, value.lost, value.blown, value.twin_nonfinite, value.twin_largest) == (0.0, 0, 0, 1, 1.0)


def test_integers_booleans_and_empty_tensors_can_be_measured():
    measures = Measures()
    assert measures.measure(torch.tensor([2**40 + 1, 0]), None, exact=False).largest == 2**40 + 1
    assert measures.measure(torch.tensor([True, False]), None, exact=False).zeros == 1
    assert measures.measure(torch.empty(0, 3), None, exact=False) == Values("float32", (0, 3), 0)


def test_only_the_twin_being_zero_is_an_infinite_error():
    value = Values("float32", (1,), 1)
    _fill(value, [0, 0, 0, 0, 0, 0, 0], [1.0, 1.0, 0.0, 1.0, 0.0], exact=False)
    assert value.error == math.inf


def big(seed=0, *, dtype=torch.float16):
    """A tensor of every kind of number, in more than one program, and its twin."""
    dice = torch.Generator().manual_seed(seed)
    twin = torch.randn(9001, generator=dice) * 10.0 ** torch.randint(-9, 6, (9001,), generator=dice)
    twin[7], twin[8], twin[9] = math.inf, math.nan, -math.inf
    x = twin.to(dtype)
    x[11], x[12] = math.nan, 0.0
    return x, twin


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", mostly_slow(["flat", "strided", "transposed", "apart"], every=2))
def test_the_kernel_gives_the_figures_of_the_torch_operations(dtype, shape):
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.triton_interpreter import allow_tensors_as_bounds

    from floatline.probe.trace.measure_launch import Rows

    allow_tensors_as_bounds()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, twin = (t.to(device) for t in big(dtype=dtype))
    if shape == "transposed":
        x, twin = (t[:9000].view(90, 100).t() for t in (x, twin))
    elif shape == "strided":
        x, twin = (t[::3] for t in (x, twin))
    elif shape == "apart":
        x, twin = x[:9000].view(90, 100).t(), twin[:9000].view(90, 100).t().contiguous()
    rows = Rows()
    assert rows.takes(x, twin)
    for other in (twin, None, twin):
        rows.measure(x, other)
    read = rows.read()
    assert len(read) == 3
    for other, (counts, sizes) in zip((twin, None, twin), read, strict=True):
        plain_counts, plain_sizes = reduce_on_device(x, other)
        assert counts == plain_counts.tolist()
        assert sizes[:3] == plain_sizes.tolist()[:3]
        assert sizes[3:] == pytest.approx(plain_sizes.tolist()[3:], rel=1e-12)
    assert rows.read() == []


@pytest.mark.parametrize("size", [1, 15, 16, 17, 4096, 9008])
@pytest.mark.parametrize("worst", [None, 0, -1])
def test_the_kernel_counts_every_number_once_wherever_what_is_not_finite_stands(size, worst):
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.triton_interpreter import allow_tensors_as_bounds

    from floatline.probe.trace.measure_launch import Rows

    allow_tensors_as_bounds()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    twin = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(device) * 1e-6
    x = twin.half()
    if worst is not None:
        x[worst], twin[worst] = math.inf, math.nan
    rows = Rows()
    rows.measure(x, twin)
    ((counts, sizes),) = rows.read()
    plain_counts, plain_sizes = (figures.tolist() for figures in reduce_on_device(x, twin))
    assert counts == plain_counts
    assert sum(counts[1:4]) == (worst is not None)
    assert sizes[:3] == plain_sizes[:3]
    assert sizes[3:] == pytest.approx(plain_sizes[3:], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 16, 9001])
def test_the_kernel_counts_what_stands_still_in_a_sum_as_torch_does(size, dtype):
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.triton_interpreter import allow_tensors_as_bounds

    from floatline.probe.trace.measure_launch import Rows

    allow_tensors_as_bounds()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dice = torch.Generator().manual_seed(size)
    before = torch.randn(size, generator=dice).to(device, dtype)
    step = torch.randn(size, generator=dice).to(device) * 1e-3
    step[::5] = 0.0
    if size > 20:
        step[7], step[8], before[9], step[10] = math.inf, math.nan, -math.inf, 1e6
    exact, result = before.float() + step, (before.float() + step).to(dtype)
    rows = Rows()
    counted = rows.count_stuck(before, exact, result)
    assert counted is not None
    (plain,) = count_stuck([[RunningSum(before, exact)]], [result])
    assert counted.tolist() == plain.tolist()
    assert size < 20 or 0 < counted[1] < counted[0] < size
    assert rows.count_stuck(before[::2], exact[::2], result[::2]) is None or size == 1
    assert rows.count_stuck(before[:0], exact[:0], result[:0]) is None


def test_the_kernel_is_not_given_what_it_cannot_read():
    pytest.importorskip("triton", reason="triton is not installed")
    from floatline.probe.trace.measure_launch import Rows

    assert not Rows().takes(torch.ones(3, dtype=torch.float64), None)
    assert not Rows().takes(torch.ones(3, dtype=torch.int64), None)
    assert not Rows().takes(torch.ones(3), torch.ones(3, dtype=torch.float64))


PLACES = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ]),
]  # fmt: skip


def measure_late(x, twin, *, exact=False):
    """The figures of a tensor as if it lay on a device; what its recorder has for it until the end."""
    measures = Measures()
    values = Values(str(x.dtype).removeprefix("torch."), tuple(x.shape), x.numel())
    measures._measure_later(values, x, twin, exact=exact)
    waiting = len(measures._kept), len(measures._pending)
    first, flat = x.clone(), measures.reshape(values, (x.numel(),))
    x.zero_()  # it may be written to afterwards
    measures.read()
    assert (measures._kept, measures._num_kept) == ([], 0)
    x.copy_(first)
    assert flat == dataclasses.replace(values, shape=(x.numel(),))
    return values, waiting


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setattr(module, "_KERNEL", "no such module")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", ["flat", "transposed", "strided", "large"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("no_triton")
def test_a_small_tensor_has_the_same_figures_by_way_of_the_host(dtype, shape, place):
    x, twin = (t.to(place) for t in big(dtype=dtype))
    if shape == "transposed":
        x, twin = (t[:9000].view(90, 100).t() for t in (x, twin))
    elif shape == "strided":
        x, twin = (t[::3] for t in (x, twin))
    elif shape == "large":
        x, twin = x.repeat(2), twin.repeat(2)
    for other in (twin, None):
        values, waiting = measure_late(x, other)
        assert waiting == ((0, 1) if shape == "large" else (1, 0))
        at_once = Measures().measure(x.cpu(), None if other is None else other.cpu(), exact=False)
        assert (values.error or 0.0) == pytest.approx(at_once.error or 0.0, rel=1e-6)
        assert dataclasses.replace(values, error=at_once.error) == at_once


@pytest.mark.usefixtures("no_triton")
def test_a_small_tensor_that_is_its_own_twin_is_so_by_way_of_the_host():
    values, _ = measure_late(torch.tensor([2.0, math.inf]), None, exact=True)
    assert (values.twin_largest, values.twin_nonfinite, values.largest) == (2.0, 1, 2.0)


@pytest.mark.usefixtures("no_triton")
def test_small_tensors_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(module, "_MOST_KEPT", 10)
    measures = Measures()
    for _ in range(3):
        measures._measure_later(Values("float32", (4,), 4), torch.ones(4), None, exact=False)
    assert (len(measures._kept), len(measures._pending)) == (2, 1)


@pytest.mark.usefixtures("no_triton")
def test_triton_is_asked_for_once_there_is_enough_to_measure(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_make_rows", asked.append)
    monkeypatch.setattr(module, "_WORTH_TRITON", 100)
    measures = Measures()
    for _ in range(8):
        measures._measure_later(Values("float32", (4,), 4), torch.ones(4), None, exact=False)
        assert len(asked) == (measures._bytes > 100)
    assert measures._bytes == 128


@pytest.mark.usefixtures("no_triton")
def test_triton_is_asked_for_at_the_first_large_tensor(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_make_rows", asked.append)
    monkeypatch.setattr(module, "_LARGE", 12)
    for size in (3, 4):
        Measures()._measure_later(Values("float32", (size,), size), torch.ones(size), None, exact=False)
        assert len(asked) == (size == 4)


@pytest.mark.usefixtures("no_triton")
@pytest.mark.parametrize(("num", "size", "place", "expected"), [
    (32, 2**14 + 1, "meta", 1), (31, 2**14 + 1, "meta", 0), (99, 2**14, "meta", 0), (99, 2**14 + 1, "cpu", 0),
])  # fmt: skip
def test_triton_is_asked_for_from_the_first_tensor_of_a_model_with_many_large_weights_on_a_device(
    monkeypatch, num, size, place, expected
):
    asked = []
    monkeypatch.setattr(module, "_make_rows", asked.append)
    measures = Measures()
    measures.expect(torch.empty(size, device=place) for _ in range(num))
    measures._measure_later(Values("float32", (4,), 4), torch.ones(4), None, exact=False)
    assert len(asked) == expected


@pytest.mark.usefixtures("no_triton")
def test_triton_is_asked_for_once_many_tensors_are_too_large_to_keep(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_make_rows", asked.append)
    monkeypatch.setattr(module, "_MOST_KEPT", 8)
    monkeypatch.setattr(module, "_MANY", 3)
    measures = Measures()
    for i in range(8):
        measures._measure_later(Values("float32", (4,), 4), torch.ones(4), None, exact=False)
        assert len(asked) == (i > 4)  # two are kept, three pending


def test_triton_is_asked_for_at_once_where_it_is_loaded_already(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_make_rows", asked.append)
    monkeypatch.setattr(module, "_KERNEL", "torch")
    Measures()._measure_later(Values("float32", (4,), 4), torch.ones(4), None, exact=False)
    assert asked == [torch.device("cpu")]
