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
