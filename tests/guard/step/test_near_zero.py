"""The kernel that counts near-zero gradients, against torch operations."""

import pytest
import torch

from floatline.guard.step.layers import SMALLEST_FP16, count_near_zero

pytest.importorskip("triton", reason="triton is not installed")

from tests.triton_interpreter import allow_tensors_as_bounds

allow_tensors_as_bounds()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_grads():
    generator = torch.Generator().manual_seed(0)
    sizes = [(7,), (40, 600), (0,), (3,), (16384,)]
    values = [torch.randn(size, generator=generator) * 4 * SMALLEST_FP16 for size in sizes]
    values = [value.half() for value in values]
    values[3][:] = torch.tensor([float("inf"), float("nan"), 0.0])
    return [
        values[0].float(), values[1], values[2], values[3], values[4].float(), values[1].t(), values[4].bfloat16(),
        torch.randn(50, generator=generator) * SMALLEST_FP16,  # made in FP32: nothing was lost
    ]  # fmt: skip


@pytest.mark.parametrize("world", [1, 4])
def test_every_count_is_that_of_the_torch_operations(world):
    from floatline.guard.kernels.near_zero import NearZeroCounts

    grads = [(grad / world).to(DEVICE) for grad in make_grads()]
    count = NearZeroCounts()
    for _ in range(2):  # the second call finds the spans of the first
        found = count(grads, smallest=SMALLEST_FP16 / world)
        expected = count_near_zero(grads, smallest=SMALLEST_FP16 / world)
        assert found.dtype == expected.dtype == torch.int64
        assert found.tolist() == expected.tolist()


def test_gradients_of_one_dtype_are_counted_in_place():
    from floatline.guard.kernels.near_zero import NearZeroCounts

    grads = [grad.to(DEVICE) for grad in make_grads() if grad.dtype == torch.float16 and grad.numel()]
    assert NearZeroCounts()(grads, smallest=SMALLEST_FP16).tolist() == count_near_zero(grads).tolist()


def test_the_gradients_above_hold_something_to_count():
    assert (count_near_zero(make_grads()).sum(dim=0) > 0).all()
