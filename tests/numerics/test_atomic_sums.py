"""Sums by index in 16 bits: rounded after every addition, as CUDA's atomic additions are."""

import pytest
import torch

from floatline.numerics.half_on_cpu import HalfOnCPU


@pytest.mark.parametrize(("dtype", "stops_at"), [(torch.float16, 2048), (torch.bfloat16, 256)])
def test_a_sum_of_ones_stops_where_the_format_counts_no_further(dtype: torch.dtype, stops_at: int) -> None:
    index, ones = torch.zeros(5000, dtype=torch.long), torch.ones(5000, 3, dtype=dtype)
    with HalfOnCPU():
        scattered = torch.zeros(2, 3, dtype=dtype).scatter_add_(0, index[:, None].expand(5000, 3), ones)
        added = torch.zeros(2, 3, dtype=dtype).index_add(0, index, ones)
        counted = torch.zeros(2, dtype=dtype).scatter_add(0, index, ones[:, 0])
    for sums in (scattered, added, counted[:, None]):
        assert (sums[0] == stops_at).all() and (sums[1] == 0).all()


def test_without_the_mode_the_cpu_counts_on() -> None:
    index, ones = torch.zeros(5000, dtype=torch.long), torch.ones(5000, 3).half()
    assert (torch.zeros(2, 3).half().scatter_add_(0, index[:, None].expand(5000, 3), ones)[0] == 5000).all()


def one_by_one(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    result = target.clone()
    for place in torch.cartesian_prod(*(torch.arange(size) for size in index.shape)).tolist():
        to = list(place)
        to[dim] = int(index[tuple(place)])
        result[tuple(to)] = result[tuple(to)] + source[tuple(place)]
    return result


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_any_dimension_is_added_in_the_order_of_the_source(dim: int) -> None:
    torch.manual_seed(0)
    target, source = torch.randn(5, 6, 7).half(), torch.randn(4, 5, 6).half() * 100
    index = torch.randint(5, (3, 5, 4))
    with HalfOnCPU():
        found = target.scatter_add(dim, index, source)
    assert torch.equal(found, one_by_one(target, dim, index, source))


@pytest.mark.parametrize("dim", [0, 1])
def test_index_add_is_the_same_for_whole_rows(dim: int) -> None:
    torch.manual_seed(0)
    target, index = torch.randn(6, 6).half(), torch.randint(6, (40,))
    source = torch.randn(40, 6).half() * 30
    source = source if dim == 0 else source.T.contiguous()
    whole = index[:, None].expand(40, 6) if dim == 0 else index[None].expand(6, 40)
    with HalfOnCPU():
        assert torch.equal(target.index_add(dim, index, source), one_by_one(target, dim, whole, source))
        doubled = target.index_add(dim, index, source, alpha=2)
        assert torch.equal(doubled, one_by_one(target, dim, whole, source * 2))


def test_in_place_it_writes_to_the_tensor_and_to_views_of_it() -> None:
    target = torch.zeros(4, 6).half()
    view = target[:, ::2]
    with HalfOnCPU():
        result = view.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 3).half())
    assert result is view and target[1].tolist() == [2, 0, 2, 0, 2, 0]


def test_nothing_to_add_changes_nothing() -> None:
    target = torch.ones(3, 2).half()
    with HalfOnCPU():
        assert torch.equal(target.index_add(0, torch.zeros(0, dtype=torch.long), torch.zeros(0, 2).half()), target)
        assert torch.equal(target.scatter_add(0, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2).half()), target)


def test_gradients_of_index_select_are_added_so_too() -> None:
    x = torch.zeros(1, 1, dtype=torch.float16, requires_grad=True)
    with HalfOnCPU():
        x.index_select(0, torch.zeros(3000, dtype=torch.long)).backward(torch.ones(3000, 1).half())
    assert x.grad is not None and float(x.grad) == 2048


def test_float32_is_left_alone() -> None:
    with HalfOnCPU():
        assert float(torch.zeros(1).index_add(0, torch.zeros(5000, dtype=torch.long), torch.ones(5000))) == 5000
