"""Figures of tensors: by hand, and the same on the CPU as on a device."""

import math

import pytest
import torch

from floatline.probe.measures import Measures, _fill, _reduce_on_cpu, _to_numpy, reduce_on_device
from floatline.probe.trace import Values

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
@pytest.mark.parametrize("shape", ["flat", "transposed", "strided", "apart"])
def test_the_kernel_gives_the_figures_of_the_torch_operations(dtype, shape):
    pytest.importorskip("triton", reason="triton is not installed")
    from floatline.probe.measure_launch import Rows

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


def test_the_kernel_is_not_given_what_it_cannot_read():
    pytest.importorskip("triton", reason="triton is not installed")
    from floatline.probe.measure_launch import Rows

    assert not Rows().takes(torch.ones(3, dtype=torch.float64), None)
    assert not Rows().takes(torch.ones(3, dtype=torch.int64), None)
    assert not Rows().takes(torch.ones(3), torch.ones(3, dtype=torch.float64))
