"""Buffers kept and put back, in one launch over a table of addresses."""

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def move_kernel(table, applied, KEEPS: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one span of words: to where it is kept, or back, unless the step was applied. Rows: live, kept, number."""
    row = table + tl.program_id(0) * 3
    live = tl.load(row).to(tl.pointer_type(WORD))
    kept = tl.load(row + 1).to(tl.pointer_type(WORD))
    lane = tl.arange(0, BLOCK)
    inside = lane < tl.load(row + 2)
    if KEEPS:
        tl.store(kept + lane, tl.load(live + lane, mask=inside), mask=inside)
    elif tl.load(applied) == 0:
        tl.store(live + lane, tl.load(kept + lane, mask=inside), mask=inside)
