"""Counting gradient elements at zero and just above it, in one launch over a table of addresses."""

import triton
import triton.language as tl

SPAN = 16384
BLOCK = 2048


@triton.jit
def count_kernel(
    addresses, sizes, tensors, offsets, counts, below, one, low, GRAD_TYPE: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the zeros, ones, low and below of one span to those of its tensor; see `count_near_zero`."""
    span = tl.program_id(0)
    tensor = tl.load(tensors + span)
    start = tl.load(offsets + span)
    numel = tl.load(sizes + tensor)
    grad = tl.load(addresses + tensor).to(tl.pointer_type(GRAD_TYPE))
    lane = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.int32)
    ones = tl.zeros([BLOCK], tl.int32)
    lows = tl.zeros([BLOCK], tl.int32)
    belows = tl.zeros([BLOCK], tl.int32)
    for first in range(start, tl.minimum(start + SPAN, numel), BLOCK):
        size = tl.abs(tl.load(grad + first + lane, mask=first + lane < numel, other=float("inf")).to(tl.float32))
        zero = size == 0.0
        zeros += zero.to(tl.int32)
        ones += ((size < one) & (zero == 0)).to(tl.int32)
        lows += ((size >= one) & (size < low)).to(tl.int32)
        belows += ((size < below) & (zero == 0)).to(tl.int32)
    # Whole numbers: the order of the additions does not matter.
    tl.atomic_add(counts + tensor * 4, tl.sum(zeros))
    tl.atomic_add(counts + tensor * 4 + 1, tl.sum(ones))
    tl.atomic_add(counts + tensor * 4 + 2, tl.sum(lows))
    tl.atomic_add(counts + tensor * 4 + 3, tl.sum(belows))
