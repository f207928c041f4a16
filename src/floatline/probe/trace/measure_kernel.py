"""Measuring a tensor and its twin in one launch, for devices that Triton knows."""

import triton
import triton.language as tl

_INF = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize=["numel", "row", "has_twin"])
def measure_kernel(x_ptr, twin_ptr, counts, bits, squares, numel, row, has_twin, BLOCK: tl.constexpr):
    """Add the figures of a flat tensor to a row of them; see `reduce_on_device`.

    Magnitudes are compared by their bits: for numbers without a sign they are in the same order. Whether there is a
    twin is asked as it runs: compiling the kernel once more takes most of a second.
    """
    lane = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.int32)
    above = tl.zeros([BLOCK], tl.int32)
    under = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    largest = tl.zeros([BLOCK], tl.int32)
    smallest = tl.full([BLOCK], _INF, tl.int32)
    twin_bad = tl.zeros([BLOCK], tl.int32)
    lost = tl.zeros([BLOCK], tl.int32)
    blown = tl.zeros([BLOCK], tl.int32)
    twin_largest = tl.zeros([BLOCK], tl.int32)
    difference = tl.zeros([BLOCK], tl.float64)
    norm = tl.zeros([BLOCK], tl.float64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for first in range(start, numel, tl.num_programs(0).to(tl.int64) * BLOCK):
        inside = first + lane < numel
        x = tl.load(x_ptr + first + lane, mask=inside, other=0.0).to(tl.float32)
        raw = x.to(tl.int32, bitcast=True)
        size = raw & 0x7FFFFFFF
        finite = size < _INF
        zeros += (inside & (size == 0)).to(tl.int32)
        above += ((size == _INF) & (raw >= 0)).to(tl.int32)
        under += ((size == _INF) & (raw < 0)).to(tl.int32)
        nans += (size > _INF).to(tl.int32)
        largest = tl.maximum(largest, tl.where(finite, size, 0))
        smallest = tl.minimum(smallest, tl.where((size > 0) & (size <= _INF), size, _INF))
        if has_twin:
            twin = tl.load(twin_ptr + first + lane, mask=inside, other=0.0)
            twin_size = twin.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            twin_finite = twin_size < _INF
            twin_bad += (twin_size >= _INF).to(tl.int32)
            lost += ((size == 0) & (twin_size > 0) & (twin_size <= _INF)).to(tl.int32)
            blown += (twin_finite & (size >= _INF)).to(tl.int32)
            twin_largest = tl.maximum(twin_largest, tl.where(twin_finite, twin_size, 0))
            both = finite & twin_finite
            apart = tl.where(both, x - twin, 0.0).to(tl.float64)
            wide = tl.where(both, twin, 0.0).to(tl.float64)
            difference += apart * apart
            norm += wide * wide
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
