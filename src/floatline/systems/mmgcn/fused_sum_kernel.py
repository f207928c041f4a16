"""Sums of gathered rows, one node a program."""

import triton
import triton.language as tl


@triton.jit
def sum_kernel(x, sources, starts, out, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the rows of one node, so many columns of them; see `sum_rows`."""
    node = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    begin, end = tl.load(starts + node), tl.load(starts + node + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, ROWS):
        at = first + tl.arange(0, ROWS)
        rows = tl.load(sources + at, mask=at < end, other=0).to(tl.int64)
        there = (at < end)[:, None] & inside[None, :]
        part = tl.load(x + rows[:, None] * width + columns[None, :], mask=there, other=0.0)
        total += tl.sum(part.to(tl.float32), axis=0)
    tl.store(out + node * width + columns, total.to(out.dtype.element_ty), mask=inside)
