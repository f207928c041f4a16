"""The optimizer phase on a GPU: survey, decide, step. Each is one launch over a table of tensor addresses."""

import triton
import triton.language as tl

from floatline.optim.kernels.triton_storage import (
    load_block,
    load_state,
    load_weight,
    state_words,
    store_state,
    store_weight,
)

# The address table: gradients, which move from step to step, and behind them a record of these columns for each tensor.
WEIGHT, STATE1, STATE2, EXTRA, SCALE1, SCALE2, NUMEL, STREAM, START, COUNTER = (tl.constexpr(i) for i in range(10))
NUM_COLUMNS = tl.constexpr(10)
# Columns of the group table (float64), and of the table that `decide` derives from it for each tensor (float32).
NUM_HYPER = 8
NUM_DERIVED = 8


@triton.jit
def survey_kernel(
    table, tensors, offsets, sums, bad, num_tensors, SPAN: tl.constexpr, BLOCK: tl.constexpr, GRAD_TYPE: tl.constexpr
):
    """Sum of squares and number of non-finite gradients of each span of one tensor."""
    span = tl.program_id(0)
    tensor = tl.load(tensors + span)
    start = tl.multiple_of(tl.load(offsets + span), BLOCK)
    numel = tl.load(table + num_tensors + tensor * NUM_COLUMNS + NUMEL)
    grad = tl.load(table + tensor)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    if (start + SPAN <= numel) & (grad % 16 == 0):
        for first in tl.static_range(0, SPAN, BLOCK):
            g = load_block(grad, start + first + lane, None, GRAD_TYPE, False).to(tl.float32)
            squares += g * g
    else:
        for first in range(start, tl.minimum(start + SPAN, numel), BLOCK):
            g = load_block(grad, first + lane, first + lane < numel, GRAD_TYPE, True).to(tl.float32)
            squares += g * g
    total = tl.sum(squares)
    tl.store(sums + span, total)
    # Finite squares have a finite sum, but for overflow: only where it is not are they counted, in a second look.
    count = 0
    if (total < float("inf")) == 0:
        for first in range(start, tl.minimum(start + SPAN, numel), BLOCK):
            g = load_block(grad, first + lane, first + lane < numel, GRAD_TYPE, True).to(tl.float32)
            count += tl.sum((tl.abs(g) < float("inf")).to(tl.int32) ^ 1)
    tl.store(bad + span, count)


@triton.jit
def gather_kernel(sums, bad, firsts, counts, tensor_sums, tensor_bad, CHUNK: tl.constexpr):
    """Add up what was found in the spans of each tensor."""
    tensor = tl.program_id(0)
    first = tl.load(firsts + tensor)
    last = first + tl.load(counts + tensor)
    lane = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float64)
    count = tl.zeros([CHUNK], tl.int32)
    for start in range(first, last, CHUNK):
        total += tl.load(sums + start + lane, mask=start + lane < last, other=0.0).to(tl.float64)
        count += tl.load(bad + start + lane, mask=start + lane < last, other=0)
    tl.store(tensor_sums + tensor, tl.sum(total).to(tl.float32))
    tl.store(tensor_bad + tensor, tl.sum(count))


@triton.jit
def decide_kernel(
    sums, num_spans, scale, clip_norm, skip, applied, factor, norm,
    groups, hyper, counters, derived, num_tensors,
    RULE: tl.constexpr, MODE: tl.constexpr, HAS_CLIP: tl.constexpr, CHUNK: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """Decide whether and with which factor to step, count the step, and derive what the update multiplies by.

    One program, so that nothing waits for the host. MODE: "survey" decides from the survey's sums, "given" takes
    the decision as it stands, "always" applies.
    """
    counted = 1.0
    multiplier = 1.0
    if MODE == "survey":
        # A gradient that is not finite has left a sum that is not: its spans need not be counted.
        total = tl.zeros([CHUNK], tl.float64)
        lane = tl.arange(0, CHUNK)
        for start in range(0, num_spans, CHUNK):
            total += tl.load(sums + start + lane, mask=start + lane < num_spans, other=0.0).to(tl.float64)
        inverse = 1.0 / tl.load(scale).to(tl.float64)
        size = tl.sqrt(tl.sum(total)) * inverse
        wide = inverse
        if HAS_CLIP:
            wide = inverse * tl.minimum(tl.load(clip_norm).to(tl.float64) / (size + 1e-6), 1.0)
        go = (size.to(tl.float32) < float("inf")) & (tl.load(skip) == 0)
        counted = go.to(tl.float32)
        multiplier = wide.to(tl.float32)
        tl.store(applied, go)
        tl.store(factor, multiplier)
        tl.store(norm, size.to(tl.float32))
    elif MODE == "given":
        counted = (tl.load(applied) != 0).to(tl.float32)
        multiplier = tl.load(factor)
    for start in range(0, num_tensors, TENSORS):
        _derive(start + tl.arange(0, TENSORS), counted, multiplier, groups, hyper, counters, derived, num_tensors, RULE)


@triton.jit
def _derive(tensor, applied, factor, groups, hyper, counters, derived, num_tensors, RULE: tl.constexpr):
    """Bias corrections are made in float64: in float32, 1 - 0.999 has lost five of its digits."""
    mask = tensor < num_tensors
    group = tl.load(groups + tensor, mask=mask, other=0)
    counter = tl.load(counters + tensor, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(counter, mask=mask, other=1.0) + applied
    tl.store(counter, step, mask=mask)
    row = hyper + group * 8
    lr = tl.load(row, mask=mask, other=0.0)
    decay = tl.load(row + 1, mask=mask, other=0.0)
    beta1 = tl.load(row + 2, mask=mask, other=0.5)
    beta2 = tl.load(row + 3, mask=mask, other=0.5)
    eps = tl.load(row + 4, mask=mask, other=0.0)
    sign = tl.load(row + 5, mask=mask, other=1.0)
    age = tl.maximum(step, 1.0).to(tl.float64)
    out = derived + tensor * 8
    tl.store(out + 6, eps.to(tl.float32), mask=mask)
    tl.store(out + 7, (sign * factor).to(tl.float32), mask=mask)
    if RULE == "adamw" or RULE == "adam":
        correction1 = 1.0 - tl.exp(age * tl.log(beta1))
        correction2 = 1.0 - tl.exp(age * tl.log(beta2))
        shrink = 1.0 - lr * decay
        if RULE == "adam":
            shrink = decay
        tl.store(out + 0, shrink.to(tl.float32), mask=mask)
        tl.store(out + 1, (1.0 - beta1).to(tl.float32), mask=mask)
        tl.store(out + 2, beta2.to(tl.float32), mask=mask)
        tl.store(out + 3, (1.0 - beta2).to(tl.float32), mask=mask)
        tl.store(out + 4, (-lr / correction1).to(tl.float32), mask=mask)
        tl.store(out + 5, tl.sqrt(correction2).to(tl.float32), mask=mask)
    elif RULE == "lion":
        tl.store(out + 0, (1.0 - lr * decay).to(tl.float32), mask=mask)
        tl.store(out + 1, (1.0 - beta1).to(tl.float32), mask=mask)
        tl.store(out + 2, beta1.to(tl.float32), mask=mask)
        tl.store(out + 3, beta2.to(tl.float32), mask=mask)
        tl.store(out + 4, (-lr).to(tl.float32), mask=mask)
        tl.store(out + 5, (1.0 - beta2).to(tl.float32), mask=mask)
    else:  # sgd: beta1 is the momentum, beta2 the dampening; the first step starts the buffer
        tl.store(out + 0, decay.to(tl.float32), mask=mask)
        tl.store(out + 1, beta1.to(tl.float32), mask=mask)
        tl.store(out + 2, (1.0 - beta2).to(tl.float32), mask=mask)
        tl.store(out + 3, (step > 1.0).to(tl.float32), mask=mask)
        tl.store(out + 4, (-lr).to(tl.float32), mask=mask)


@triton.jit
def step_kernel(
    table,
    tensors,
    offsets,
    derived,
    applied,
    seed,
    num_tensors,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    RULE: tl.constexpr,
    DECIDED: tl.constexpr,
    UPDATE: tl.constexpr,
    STATES: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Unscale, clip, update and round one block of one tensor; nothing is touched where the step is skipped."""
    block = tl.program_id(0)
    tensor = tl.load(tensors + block)
    start = tl.multiple_of(tl.load(offsets + block), BLOCK)
    record = table + num_tensors + tensor * NUM_COLUMNS
    numel = tl.load(record + NUMEL)
    grad = tl.load(table + tensor)
    weight = tl.load(record + WEIGHT)
    state1 = tl.load(record + STATE1)
    state2 = tl.load(record + STATE2)
    extra = tl.load(record + EXTRA)
    scale1 = tl.load(record + SCALE1)
    scale2 = tl.load(record + SCALE2)
    if DECIDED:  # asked for last, so that nothing above waits for the answer
        if tl.load(applied) == 0:
            return
    # Addresses from a table have lost their alignment: it is said again where it holds.
    if (start + BLOCK <= numel) & ((weight | grad | state1 | state2 | extra) % 16 == 0):
        _step_block(
            weight, grad, state1, state2, extra, scale1, scale2, start, numel,
            derived + tensor * 8, tl.load(record + STREAM), tl.load(record + START), tl.load(record + COUNTER), seed,
            BLOCK, RULE, UPDATE, STATES, MOMENTUM, NESTEROV, WEIGHT_TYPE, GRAD_TYPE, WHOLE, False,
        )  # fmt: skip
    elif PIECE == BLOCK:
        _step_block(
            weight, grad, state1, state2, extra, scale1, scale2, start, numel,
            derived + tensor * 8, tl.load(record + STREAM), tl.load(record + START), tl.load(record + COUNTER), seed,
            BLOCK, RULE, UPDATE, STATES, MOMENTUM, NESTEROV, WEIGHT_TYPE, GRAD_TYPE, WHOLE, True,
        )  # fmt: skip
    else:
        # In small pieces: all at once, addresses and masks of single elements would take every register there is.
        for piece in range(start, tl.minimum(start + BLOCK, numel), PIECE):
            _step_block(
                weight, grad, state1, state2, extra, scale1, scale2, piece, numel,
                derived + tensor * 8, tl.load(record + STREAM), tl.load(record + START), tl.load(record + COUNTER),
                seed, PIECE, RULE, UPDATE, STATES, MOMENTUM, NESTEROV, WEIGHT_TYPE, GRAD_TYPE, WHOLE, True,
            )  # fmt: skip


@triton.jit
def _step_block(
    weight, grad, state1, state2, extra, scale1, scale2, start, numel, derived, stream, first, counter, seed,
    BLOCK: tl.constexpr, RULE: tl.constexpr, UPDATE: tl.constexpr, STATES: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, WEIGHT_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, WHOLE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    index = start + tl.arange(0, BLOCK)
    mask = index < numel
    if not MASKED:
        mask = tl.full([BLOCK], True, tl.int1)
    step = 0
    if UPDATE == "stochastic" or STATES != "fp32":
        step = tl.load(counter.to(tl.pointer_type(tl.float32))).to(tl.int32)
    first_half = 0
    second_half = 0
    if STATES != "fp32":
        # 16 random bits are enough for a state: one word serves both.
        words = state_words(start, index, first, seed, step, stream + (1 << 28), BLOCK, WHOLE)
        first_half = words >> 16
        second_half = words & 0xFFFF
    g = load_block(grad, index, mask, GRAD_TYPE, MASKED).to(tl.float32) * tl.load(derived + 7)
    w = load_weight(weight, extra, index, mask, UPDATE, WEIGHT_TYPE, MASKED)
    if RULE == "adamw" or RULE == "adam":
        m = load_state(state1, scale1, start, index, mask, STATES, True, BLOCK, MASKED)
        v = load_state(state2, scale2, start, index, mask, STATES, False, BLOCK, MASKED)
        if RULE == "adamw":
            w = w * tl.load(derived)
        else:
            g = g + w * tl.load(derived)
        # Fused where torch's own CUDA kernels fuse, and nowhere else.
        m = tl.fma(g - m, tl.load(derived + 1), m)
        v = tl.fma(g * g, tl.load(derived + 3), v * tl.load(derived + 2))
        if STATES == "fp32":
            denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(derived + 5)) + tl.load(derived + 6)
            quotient = tl.div_rn(m, denominator)
        else:  # moments that were rounded to 8 or 16 bits: the last bits of root and quotient say nothing
            root = tl.rsqrt(tl.fma(tl.sqrt(v), 1.0 / tl.load(derived + 5), tl.load(derived + 6)))
            quotient = m * root * root
        w = tl.fma(quotient, tl.load(derived + 4), w)
        store_state(state1, scale1, start, index, mask, m, first_half, STATES, True, BLOCK, MASKED)
        store_state(state2, scale2, start, index, mask, v, second_half, STATES, False, BLOCK, MASKED)
    elif RULE == "lion":
        m = load_state(state1, scale1, start, index, mask, STATES, True, BLOCK, MASKED)
        w = w * tl.load(derived)
        u = m * tl.load(derived + 2) + g * tl.load(derived + 1)
        direction = (u > 0).to(tl.float32) - (u < 0).to(tl.float32)
        w = w + tl.load(derived + 4) * tl.where(u == u, direction, u)
        m = m * tl.load(derived + 3) + g * tl.load(derived + 5)
        store_state(state1, scale1, start, index, mask, m, first_half, STATES, True, BLOCK, MASKED)
    else:
        g = g + w * tl.load(derived)
        if MOMENTUM:
            m = load_state(state1, scale1, start, index, mask, STATES, True, BLOCK, MASKED)
            keep = tl.load(derived + 3)
            m = tl.where(keep == 0.0, g, m * tl.load(derived + 1) + g * tl.load(derived + 2))
            store_state(state1, scale1, start, index, mask, m, first_half, STATES, True, BLOCK, MASKED)
            if NESTEROV:
                g = g + m * tl.load(derived + 1)
            else:
                g = m
        w = w + tl.load(derived + 4) * g
    store_weight(
        weight, extra, start, index, mask, w, seed, step, stream, first, UPDATE, WEIGHT_TYPE, BLOCK, WHOLE, MASKED
    )
