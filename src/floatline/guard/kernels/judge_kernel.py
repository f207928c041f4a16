"""The judge in one launch, for devices that Triton knows: what `Judge` does with torch operations, number by number."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _middle(values, valid, lower, upper):
    """Mean of the values whose ranks among the valid ones are `lower` and `upper`."""
    places = tl.arange(0, values.shape[0])
    row, column = values[:, None], values[None, :]
    before = (row > column) | ((row == column) & (places[:, None] > places[None, :]))
    rank = tl.sum((before & valid[None, :]).to(tl.int32), 1)
    first = tl.sum(tl.where(valid & (rank == lower), values, 0.0), 0)
    second = tl.sum(tl.where(valid & (rank == upper), values, 0.0), 0)
    return (first + second) * 0.5


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _score(window, log, warmup, score_floor, ROBUST: tl.constexpr, WINDOW: tl.constexpr, RECENT: tl.constexpr):
    """Score of one logarithm against its window, whose newest value stands last; NaN where there is none."""
    places = tl.arange(0, WINDOW)
    values = tl.load(window + places)
    earlier = tl.load(window + places - 1, mask=places > 0, other=float("nan"))
    spread = tl.abs(values - earlier)
    known = tl.sum((values == values).to(tl.int32), 0)
    num = tl.maximum(known - 1, 1)
    median = _middle(spread, spread == spread, (num - 1) // 2, num // 2)
    level = _middle(values, (places >= WINDOW - RECENT) & (values == values), RECENT // 2 - 1, RECENT // 2)
    score = (log - level) / tl.maximum(median * ROBUST, score_floor)
    return tl.where((known >= warmup) & _finite(log), score, float("nan"))


@triton.jit
def _push(window, log, accepted, WINDOW: tl.constexpr):
    """Move the window on by one value where it is accepted."""
    places = tl.arange(0, WINDOW)
    values = tl.load(window + places)
    later = tl.load(window + places + 1, mask=places < WINDOW - 1, other=0.0)
    moved = tl.where(places == WINDOW - 1, log, later)
    moved = tl.where(accepted, tl.where(_finite(log), moved, values), values)
    # Every place is read, by all threads, before the first is written.
    tl.debug_barrier()
    tl.store(window + places, moved)


@triton.jit
def judge_kernel(
    loss_ptr, worst_ptr, size_ptr, divisor_ptr, skip_ptr, known_ptr,
    scale_ptr, good_ptr, overflows_ptr, window_ptr, applied_ptr, out_ptr,
    divisor, clip_norm, outlier_score, skip_norm_above, score_floor, growth, backoff, floor, cap,
    warmup, interval, hysteresis,
    IS_TOTAL: tl.constexpr, DIVISOR_IN_MEMORY: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_CLIP: tl.constexpr,
    SKIP_OUTLIERS: tl.constexpr, HAS_KNOWN: tl.constexpr,
    SCALED: tl.constexpr, ROBUST: tl.constexpr, WINDOW: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """Decide one step; see `Judge.judge`. `size` is a sum of squares, or a norm, of the scaled gradients."""
    loss, worst = tl.load(loss_ptr), tl.load(worst_ptr)
    scale = tl.load(scale_ptr)
    if DIVISOR_IN_MEMORY:
        unit = scale * tl.load(divisor_ptr)
    else:
        unit = scale * divisor
    size = tl.load(size_ptr)
    if IS_TOTAL:
        norm = tl.sqrt_rn(size) / unit
    else:
        norm = size
    loss_log, norm_log = tl.log(worst), tl.log(norm)
    loss_score = _score(window_ptr, loss_log, warmup, score_floor, ROBUST, WINDOW, RECENT)
    norm_score = _score(window_ptr + WINDOW, norm_log, warmup, score_floor, ROBUST, WINDOW, RECENT)
    # Places in REASONS, the stronger ones last.
    outlier = norm > skip_norm_above
    if SKIP_OUTLIERS:
        strange = (loss_score > outlier_score) | (norm_score > outlier_score)
        if HAS_KNOWN:
            strange = strange & (tl.load(known_ptr) == 0)
        outlier = outlier | strange
    reason = tl.where(outlier, 3.0, 0.0)
    if HAS_SKIP:
        reason = tl.where(tl.load(skip_ptr) != 0, 4.0, reason)
    reason = tl.where(_finite(norm), reason, 1.0)
    reason = tl.where(_finite(worst), reason, 2.0)
    applied, overflow = reason == 0.0, reason == 1.0
    factor = 1.0 / unit
    if HAS_CLIP:
        factor = tl.minimum(clip_norm / (norm + 1e-6), 1.0) * factor
    tl.store(applied_ptr, applied)
    tl.store(out_ptr, loss)
    tl.store(out_ptr + 1, scale)
    tl.store(out_ptr + 2, norm)
    tl.store(out_ptr + 3, reason)
    tl.store(out_ptr + 4, loss_score)
    tl.store(out_ptr + 5, norm_score)
    tl.store(out_ptr + 6, factor)
    _push(window_ptr, loss_log, applied, WINDOW)
    _push(window_ptr + WINDOW, norm_log, applied, WINDOW)
    if SCALED:
        row = tl.load(overflows_ptr)
        row = tl.where(overflow, row + 1.0, tl.where(applied, 0.0, row))
        good = tl.load(good_ptr)
        good = tl.where(applied, good + 1.0, tl.where(overflow, 0.0, good))
        grow = good >= interval
        moved = tl.where(overflow & (row >= hysteresis), scale * backoff, scale)
        moved = tl.where(grow, moved * growth, moved)
        tl.store(overflows_ptr, row)
        tl.store(good_ptr, tl.where(grow, 0.0, good))
        tl.store(scale_ptr, tl.minimum(tl.maximum(moved, floor), cap))
