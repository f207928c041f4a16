"""Measuring a tensor and its twin in one launch, for devices that Triton knows."""

import triton
import triton.language as tl

_INF = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize=["numel", "row", "has_twin"])
def measure_kernel(x_ptr, twin_ptr, counts, bits, squares, numel, row, has_twin, BLOCK: tl.constexpr):
    """Add the figures of a flat tensor to a row of them; see `reduce_on_device`.

    Magnitudes are compared by their bits: for numbers without a sign they are in the same order. Whether there is a
    twin is asked as it runs: compiling the kernel once more takes most of a second.

    What is not finite is rare, and takes most of the counting. A program looks at its numbers without it, and once
    more with it if any is not. Those behind the last multiple of 16 belong to the last program, so that the others
    read 16 bytes at a time. Of eight neighbours, which one thread reads, one figure each is kept: with figures of
    every lane too few programs fit on the device at a time to use its memory's speed.
    """
    lane = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    zeros = tl.zeros([BLOCK // 8], tl.int32)
    above = tl.zeros([BLOCK // 8], tl.int32)
    under = tl.zeros([BLOCK // 8], tl.int32)
    nans = tl.zeros([BLOCK // 8], tl.int32)
    largest = tl.zeros([BLOCK // 8], tl.int32)
    smallest = tl.full([BLOCK // 8], _INF, tl.int32)
    twin_bad = tl.zeros([BLOCK // 8], tl.int32)
    lost = tl.zeros([BLOCK // 8], tl.int32)
    blown = tl.zeros([BLOCK // 8], tl.int32)
    twin_largest = tl.zeros([BLOCK // 8], tl.int32)
    difference = tl.zeros([BLOCK // 8], tl.float64)
    norm = tl.zeros([BLOCK // 8], tl.float64)
    even = (numel // 16).to(tl.int64) * 16
    is_last = tl.program_id(0) == tl.num_programs(0) - 1
    start = tl.program_id(0).to(tl.int64) * BLOCK
    stride = (tl.num_programs(0) - 1).to(tl.int64) * BLOCK
    for first in range(start, tl.where(is_last, 0, even), stride):
        inside = first + lane < even
        x = tl.load(x_ptr + first + lane, mask=inside, other=0.0).to(tl.float32)
        size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        zeros += tl.sum((inside & (size == 0)).to(tl.int32), 1)
        largest = tl.maximum(largest, tl.max(size, 1))
        smallest = tl.minimum(smallest, tl.min(tl.where(size > 0, size, _INF), 1))
        if has_twin:
            twin = tl.load(twin_ptr + first + lane, mask=inside, other=0.0)
            twin_size = twin.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            lost += tl.sum(((size == 0) & (twin_size > 0)).to(tl.int32), 1)
            twin_largest = tl.maximum(twin_largest, tl.max(twin_size, 1))
            apart = (x - twin).to(tl.float64)
            wide = twin.to(tl.float64)
            difference += tl.sum(apart * apart, 1)
            norm += tl.sum(wide * wide, 1)
    again = is_last | (tl.max(largest, 0) >= _INF) | (tl.max(twin_largest, 0) >= _INF)
    if again:
        zeros = tl.zeros([BLOCK // 8], tl.int32)
        largest = tl.zeros([BLOCK // 8], tl.int32)
        smallest = tl.full([BLOCK // 8], _INF, tl.int32)
        lost = tl.zeros([BLOCK // 8], tl.int32)
        twin_largest = tl.zeros([BLOCK // 8], tl.int32)
        difference = tl.zeros([BLOCK // 8], tl.float64)
        norm = tl.zeros([BLOCK // 8], tl.float64)
        end = tl.where(is_last, numel, even)
        for first in range(tl.where(is_last, even, start), end, stride):
            inside = first + lane < end
            x = tl.load(x_ptr + first + lane, mask=inside, other=0.0).to(tl.float32)
            raw = x.to(tl.int32, bitcast=True)
            size = raw & 0x7FFFFFFF
            finite = size < _INF
            zeros += tl.sum((inside & (size == 0)).to(tl.int32), 1)
            above += tl.sum(((size == _INF) & (raw >= 0)).to(tl.int32), 1)
            under += tl.sum(((size == _INF) & (raw < 0)).to(tl.int32), 1)
            nans += tl.sum((size > _INF).to(tl.int32), 1)
            largest = tl.maximum(largest, tl.max(tl.where(finite, size, 0), 1))
            smallest = tl.minimum(smallest, tl.min(tl.where((size > 0) & (size <= _INF), size, _INF), 1))
            if has_twin:
                twin = tl.load(twin_ptr + first + lane, mask=inside, other=0.0)
                twin_size = twin.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                twin_finite = twin_size < _INF
                twin_bad += tl.sum((twin_size >= _INF).to(tl.int32), 1)
                lost += tl.sum(((size == 0) & (twin_size > 0) & (twin_size <= _INF)).to(tl.int32), 1)
                blown += tl.sum((twin_finite & (size >= _INF)).to(tl.int32), 1)
                twin_largest = tl.maximum(twin_largest, tl.max(tl.where(twin_finite, twin_size, 0), 1))
                both = finite & twin_finite
                apart = tl.where(both, x - twin, 0.0).to(tl.float64)
                wide = tl.where(both, twin, 0.0).to(tl.float64)
                difference += tl.sum(apart * apart, 1)
                norm += tl.sum(wide * wide, 1)
    tl.atomic_add(counts + row * 7, tl.sum(zeros).to(tl.int64))
    tl.atomic_add(counts + row * 7 + 1, tl.sum(above).to(tl.int64))
    tl.atomic_add(counts + row * 7 + 2, tl.sum(under).to(tl.int64))
    tl.atomic_add(counts + row * 7 + 3, tl.sum(nans).to(tl.int64))
    tl.atomic_max(bits + row * 3, tl.max(largest, 0))
    # The smallest is kept as its distance from infinity: every figure of a row then begins as 0.
    tl.atomic_max(bits + row * 3 + 1, -(tl.min(smallest, 0) - _INF))
    if has_twin:
        tl.atomic_add(counts + row * 7 + 4, tl.sum(twin_bad).to(tl.int64))
        tl.atomic_add(counts + row * 7 + 5, tl.sum(lost).to(tl.int64))
        tl.atomic_add(counts + row * 7 + 6, tl.sum(blown).to(tl.int64))
        tl.atomic_max(bits + row * 3 + 2, tl.max(twin_largest, 0))
        tl.atomic_add(squares + row * 2, tl.sum(difference))
        tl.atomic_add(squares + row * 2 + 1, tl.sum(norm))


@triton.jit(do_not_specialize=["numel"])
def stuck_kernel(before_ptr, exact_ptr, result_ptr, counts, numel, BLOCK: tl.constexpr):
    """Count the elements that an exact sum changes, and those of them that came out as they were before."""
    lane = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    moved = tl.zeros([BLOCK // 8], tl.int32)
    stuck = tl.zeros([BLOCK // 8], tl.int32)
    even = (numel // 16).to(tl.int64) * 16
    for part in tl.static_range(2):  # what lies behind the last multiple of 16 is read by itself
        end = even if part == 0 else numel
        begin = tl.program_id(0).to(tl.int64) * BLOCK + (0 if part == 0 else even)
        for first in range(begin, end, tl.num_programs(0).to(tl.int64) * BLOCK):
            inside = first + lane < end
            before = tl.load(before_ptr + first + lane, mask=inside, other=0.0).to(tl.float32)
            exact = tl.load(exact_ptr + first + lane, mask=inside, other=0.0)
            result = tl.load(result_ptr + first + lane, mask=inside, other=0.0).to(tl.float32)
            finite = (exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INF
            changed = (exact != before) & finite
            moved += tl.sum(changed.to(tl.int32), 1)
            stuck += tl.sum((changed & (before == result)).to(tl.int32), 1)
    tl.atomic_add(counts, tl.sum(moved).to(tl.int64))
    tl.atomic_add(counts + 1, tl.sum(stuck).to(tl.int64))
