"""The optimizer phase on a GPU: survey, decide, step. Each is one launch over a table of tensor addresses."""

import triton
import triton.language as tl

from floatline.optim.kernels.triton_storage import load_block, load_state, load_weight, store_state, store_weight

# Rows of the address table, each with one entry per tensor.
WEIGHT, GRAD, STATE1, STATE2, EXTRA, SCALE1, SCALE2, NUMEL = (tl.constexpr(i) for i in range(8))
NUM_ROWS = 8
# Columns of the group table (float64), and of the table that `decide` derives from it for each tensor (float32).
NUM_HYPER = 8
NUM_DERIVED = 8


@triton.jit
def survey_kernel(table, tensors, offsets, sums, bad, num_tensors, BLOCK: tl.constexpr, GRAD_TYPE: tl.constexpr):
    """Sum of squares and number of non-finite gradients of each block of one tensor."""
    block = tl.program_id(0)
    tensor = tl.load(tensors + block)
    start = tl.load(offsets + block)
    numel = tl.load(table + NUMEL * num_tensors + tensor)
    grad = tl.load(table + GRAD * num_tensors + tensor).to(tl.pointer_type(GRAD_TYPE))
    total = 0.0
    count = 0
    if (start + BLOCK <= numel) & (grad.to(tl.int64) % 16 == 0):
        index = tl.multiple_of(start, 16) + tl.arange(0, BLOCK)
        g = tl.load(tl.multiple_of(grad, 16) + index).to(tl.float32)
        total = tl.sum(g * g)
        count = tl.sum((tl.abs(g) < float("inf")).to(tl.int32) ^ 1)
    else:
        index = start + tl.arange(0, BLOCK)
        g = tl.load(grad + index, mask=index < numel, other=0.0).to(tl.float32)
        total = tl.sum(g * g)
        count = tl.sum((tl.abs(g) < float("inf")).to(tl.int32) ^ 1)
    tl.store(sums + block, total)
    tl.store(bad + block, count)


@triton.jit
def decide_kernel(
    sums, bad, num_blocks, scale, clip_norm, skip, applied, factor, norm,
    groups, hyper, counters, derived, num_tensors,
    RULE: tl.constexpr, MODE: tl.constexpr, HAS_CLIP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Decide whether and with which factor to step, count the step, and derive what the update multiplies by.

    One program, so that nothing waits for the host. MODE: "survey" decides from the survey's sums, "given" takes
    the decision as it stands, "always" applies.
    """
    lane = tl.arange(0, CHUNK)
    counted = 1.0
    multiplier = 1.0
    if MODE == "survey":
        total = tl.zeros([CHUNK], tl.float64)
        count = tl.zeros([CHUNK], tl.int32)
        for start in range(0, num_blocks, CHUNK):
            mask = start + lane < num_blocks
            total += tl.load(sums + start + lane, mask=mask, other=0.0).to(tl.float64)
            count += tl.load(bad + start + lane, mask=mask, other=0)
        inverse = 1.0 / tl.load(scale).to(tl.float64)
        size = tl.sqrt(tl.sum(total)) * inverse
        wide = inverse
        if HAS_CLIP:
            wide = inverse * tl.minimum(tl.load(clip_norm).to(tl.float64) / (size + 1e-6), 1.0)
        finite = (tl.sum(count) == 0) & (size.to(tl.float32) < float("inf"))
        go = finite & (tl.load(skip) == 0)
        counted = go.to(tl.float32)
        multiplier = wide.to(tl.float32)
        tl.store(applied, go)
        tl.store(factor, multiplier)
        tl.store(norm, size.to(tl.float32))
    elif MODE == "given":
        counted = (tl.load(applied) != 0).to(tl.float32)
        multiplier = tl.load(factor)
    for start in range(0, num_tensors, CHUNK):
        _derive(start + lane, counted, multiplier, groups, hyper, counters, derived, num_tensors, RULE)


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
    streams,
    starts,
    counters,
    seed,
    num_tensors,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    DECIDED: tl.constexpr,
    UPDATE: tl.constexpr,
    STATES: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
):
    """Unscale, clip, update and round one block of one tensor; nothing is touched where the step is skipped."""
    if DECIDED:
        if tl.load(applied) == 0:
            return
    block = tl.program_id(0)
    tensor = tl.load(tensors + block)
    start = tl.load(offsets + block)
    numel = tl.load(table + NUMEL * num_tensors + tensor)
    weight = tl.load(table + WEIGHT * num_tensors + tensor)
    grad = tl.load(table + GRAD * num_tensors + tensor)
    state1 = tl.load(table + STATE1 * num_tensors + tensor)
    state2 = tl.load(table + STATE2 * num_tensors + tensor)
    extra = tl.load(table + EXTRA * num_tensors + tensor)
    scale1 = tl.load(table + SCALE1 * num_tensors + tensor)
    scale2 = tl.load(table + SCALE2 * num_tensors + tensor)
    # Addresses from a table have lost their alignment: say it again where it holds, or every load is split up.
    if (start + BLOCK <= numel) & ((weight | grad | state1 | state2 | extra) % 16 == 0):
        _step_block(
            tl.multiple_of(weight, 16), tl.multiple_of(grad, 16), tl.multiple_of(state1, 16),
            tl.multiple_of(state2, 16), tl.multiple_of(extra, 16), scale1, scale2, tl.multiple_of(start, 16), numel,
            derived + tensor * 8, tl.load(streams + tensor), tl.load(starts + tensor),
            tl.load(counters + tensor), seed,
            BLOCK, RULE, UPDATE, STATES, MOMENTUM, NESTEROV, WEIGHT_TYPE, GRAD_TYPE, False,
        )  # fmt: skip
    else:
        _step_block(
            weight, grad, state1, state2, extra, scale1, scale2, start, numel,
            derived + tensor * 8, tl.load(streams + tensor), tl.load(starts + tensor),
            tl.load(counters + tensor), seed,
            BLOCK, RULE, UPDATE, STATES, MOMENTUM, NESTEROV, WEIGHT_TYPE, GRAD_TYPE, True,
        )  # fmt: skip


@triton.jit
def _step_block(
    weight, grad, state1, state2, extra, scale1, scale2, start, numel, derived, stream, first, counter, seed,
    BLOCK: tl.constexpr, RULE: tl.constexpr, UPDATE: tl.constexpr, STATES: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, WEIGHT_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    index = start + tl.arange(0, BLOCK)
    mask = index < numel
    if not MASKED:
        mask = tl.full([BLOCK], True, tl.int1)
    step = 0
    if UPDATE == "stochastic" or STATES != "fp32":
        step = tl.load(counter.to(tl.pointer_type(tl.float32))).to(tl.int32)
    g = load_block(grad, index, mask, GRAD_TYPE, MASKED).to(tl.float32) * tl.load(derived + 7)
    w = load_weight(weight, extra, index, mask, UPDATE, WEIGHT_TYPE, MASKED)
    if RULE == "adamw" or RULE == "adam":
        m = load_state(state1, scale1, index, mask, STATES, True, BLOCK, MASKED)
        v = load_state(state2, scale2, index, mask, STATES, False, BLOCK, MASKED)
        if RULE == "adamw":
            w = w * tl.load(derived)
        else:
            g = g + w * tl.load(derived)
        # Fused where torch's own CUDA kernels fuse, and nowhere else.
        m = tl.fma(g - m, tl.load(derived + 1), m)
        v = tl.fma(g * g, tl.load(derived + 3), v * tl.load(derived + 2))
        denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(derived + 5)) + tl.load(derived + 6)
        w = tl.fma(tl.div_rn(m, denominator), tl.load(derived + 4), w)
        store_state(state1, scale1, index, mask, m, seed, step, stream, first, 1, STATES, True, BLOCK, MASKED)
        store_state(state2, scale2, index, mask, v, seed, step, stream, first, 2, STATES, False, BLOCK, MASKED)
    elif RULE == "lion":
        m = load_state(state1, scale1, index, mask, STATES, True, BLOCK, MASKED)
        w = w * tl.load(derived)
        u = m * tl.load(derived + 2) + g * tl.load(derived + 1)
        direction = (u > 0).to(tl.float32) - (u < 0).to(tl.float32)
        w = w + tl.load(derived + 4) * tl.where(u == u, direction, u)
        m = m * tl.load(derived + 3) + g * tl.load(derived + 5)
        store_state(state1, scale1, index, mask, m, seed, step, stream, first, 1, STATES, True, BLOCK, MASKED)
    else:
        g = g + w * tl.load(derived)
        if MOMENTUM:
            m = load_state(state1, scale1, index, mask, STATES, True, BLOCK, MASKED)
            keep = tl.load(derived + 3)
            m = tl.where(keep == 0.0, g, m * tl.load(derived + 1) + g * tl.load(derived + 2))
            store_state(state1, scale1, index, mask, m, seed, step, stream, first, 1, STATES, True, BLOCK, MASKED)
            if NESTEROV:
                g = g + m * tl.load(derived + 1)
            else:
                g = m
        w = w + tl.load(derived + 4) * g
    store_weight(weight, extra, index, mask, w, seed, step, stream, first, UPDATE, WEIGHT_TYPE, BLOCK, MASKED)
