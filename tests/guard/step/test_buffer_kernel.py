"""The kernel that keeps buffers and puts them back: every bit of every dtype, and nothing after an applied step."""

import pytest
import torch

from floatline.guard.step.buffer_blocks import TorchBufferBlock

pytest.importorskip("triton", reason="triton is not installed")

from tests.triton_interpreter import allow_tensors_as_bounds

allow_tensors_as_bounds()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = [torch.float32, torch.int64, torch.float64, torch.complex64]
ODD = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int16]
SIZES = [(), (1,), (7,), (64, 3), (0, 5), (5000,)]


def draw(dtype, size, number):
    """Any bits that the dtype has, NaN with its payloads among them."""
    generator = torch.Generator().manual_seed(number)
    count = torch.Size(size).numel() * torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(size).to(DEVICE)


def draw_all(dtypes, number=0):
    return [draw(dtype, size, 100 * i + j + number) for i, dtype in enumerate(dtypes) for j, size in enumerate(SIZES)]


def bits_of(tensors):
    return [tensor.reshape(-1).view(torch.uint8).tolist() for tensor in tensors]


def fused(tensors):
    from floatline.guard.kernels.buffer_launch import FusedBufferBlock

    return FusedBufferBlock(tensors)


def write(tensors, dtypes, number=7):
    for tensor, other in zip(tensors, draw_all(dtypes, number), strict=True):
        tensor.copy_(other)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("dtypes", [WORDS, WORDS + ODD], ids=["words", "bytes"])
def test_a_skipped_step_gives_every_bit_back_and_an_applied_one_none(dtypes, applied):
    live = draw_all(dtypes)
    block, before = fused(live), bits_of(live)
    for number in (7, 8):  # the second time it finds the table of the first
        block.keep()
        assert bits_of(block.kept) == before
        write(live, dtypes, number)
        after = bits_of(live)
        assert after != before
        block.settle(torch.tensor(applied, device=DEVICE))
        assert bits_of(live) == (after if applied else before)
        before = bits_of(live)


@pytest.mark.parametrize("make", [fused, TorchBufferBlock])
def test_both_blocks_do_the_same(make):
    live = draw_all([torch.float32])
    block, before = make(live), bits_of(live)
    block.keep()
    write(live, [torch.float32])
    block.settle(torch.tensor(False, device="cpu"))  # where a step raised, the host decides
    assert bits_of(live) == before


def test_a_buffer_that_is_given_other_memory_in_a_step_gets_what_it_held():
    live = draw_all([torch.float32])
    block, before = fused(live), bits_of(live)
    block.keep()
    old = [tensor.data for tensor in live]
    for tensor, other in zip(live, draw_all([torch.float32], 7), strict=True):
        tensor.data = other
    assert block.misfits() == []
    block.settle(torch.tensor(False, device=DEVICE))
    assert bits_of(live) == before == bits_of(old)
    for tensor in live:
        tensor.data = torch.zeros_like(tensor)
    assert block.misfits() == []
    block.keep()
    assert not any(map(any, bits_of(block.kept)))


def test_a_buffer_that_is_given_another_shape_is_told_before_anything_is_moved():
    live = draw_all([torch.float32])
    block = fused(live)
    block.keep()
    assert block.misfits() == []
    live[3].data = torch.zeros(2, device=DEVICE)
    assert [tensor is live[3] for tensor in block.misfits()] == [True]
