"""How the kernels read and write weights and states: the split, rounding and random words of the torch side."""

import triton
import triton.language as tl


@triton.jit
def load_block(address, index, mask, TYPE: tl.constexpr, MASKED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE)) + index
    if MASKED:
        x = tl.load(pointer, mask=mask, other=0.0)
    else:
        x = tl.load(pointer)
    return x


@triton.jit
def _store(address, index, mask, value, TYPE: tl.constexpr, MASKED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE)) + index
    if MASKED:
        tl.store(pointer, value, mask=mask)
    else:
        tl.store(pointer, value)


@triton.jit
def load_state(
    address, scale, index, mask, STATES: tl.constexpr, SIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """A state as float32; optim/storage.py says how the narrow forms keep it."""
    if STATES == "fp32":
        x = load_block(address, index, mask, tl.float32, MASKED)
    elif STATES == "bf16":
        x = load_block(address, index, mask, tl.bfloat16, MASKED).to(tl.float32)
    else:
        x = tl.load(scale.to(tl.pointer_type(tl.float32)) + tl.min(index, axis=0) // BLOCK)
        if SIGNED:
            code = load_block(address, index, mask, tl.int8, MASKED).to(tl.float32) / 127.0
            x = x * code * tl.abs(code)
        else:
            code = load_block(address, index, mask, tl.uint8, MASKED).to(tl.float32) / 255.0
            x = x * (code * code) * (code * code)
    return x


@triton.jit
def store_state(
    address, scale, index, mask, x, seed, step, stream, first, NUMBER: tl.constexpr,
    STATES: tl.constexpr, SIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if STATES == "fp32":
        _store(address, index, mask, x, tl.float32, MASKED)
    elif STATES == "bf16":
        words = _random_words(index, first, seed, step, stream + (NUMBER << 28), BLOCK)
        _store(address, index, mask, _round_stochastic(x, words, tl.bfloat16).to(tl.bfloat16), tl.bfloat16, MASKED)
    else:
        words = _random_words(index, first, seed, step, stream + (NUMBER << 28), BLOCK)
        _store_int8(address, scale, index, mask, x, words, SIGNED, BLOCK, MASKED)


@triton.jit
def _store_int8(address, scale, index, mask, x, words, SIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        x = tl.where(mask, x, 0.0)
    largest = tl.max(tl.abs(x), axis=0)  # a program's block is a block of the scale
    tl.store(scale.to(tl.pointer_type(tl.float32)) + tl.min(index, axis=0) // BLOCK, largest)
    share = tl.div_rn(tl.abs(x), tl.where(largest > 0.0, largest, 1.0))
    if SIGNED:
        power = share * 16129.0  # 127 ** 2
        below = tl.floor(tl.sqrt_rn(power))
        gap = 2.0 * below + 1.0
        low = below * below
    else:
        power = share * 4228250625.0  # 255 ** 4
        below = tl.floor(tl.sqrt_rn(tl.sqrt_rn(power)))
        above = (below + 1.0) * (below + 1.0)
        low = (below * below) * (below * below)
        gap = above * above - low
    chance = tl.maximum(tl.div_rn(power - low, gap), 0.0)
    code = tl.where(_rounds_up(words, chance), below + 1.0, below)
    if SIGNED:
        code = tl.minimum(code, 127.0)
        _store(address, index, mask, tl.where(x < 0, -code, code).to(tl.int8), tl.int8, MASKED)
    else:
        code = tl.minimum(tl.maximum(code, (x > 0.0).to(tl.float32)), 255.0)
        _store(address, index, mask, code.to(tl.int32).to(tl.uint8), tl.uint8, MASKED)


@triton.jit
def load_weight(weight, extra, index, mask, UPDATE: tl.constexpr, TYPE: tl.constexpr, MASKED: tl.constexpr):
    """The float32 weight that the update works on; numerics/split.py says what the remainder is."""
    if TYPE == tl.float32:
        wide = load_block(weight, index, mask, TYPE, MASKED)
    elif UPDATE == "exact":
        remainder = load_block(extra, index, mask, tl.int16, MASKED).to(tl.int32)
        if TYPE == tl.bfloat16:
            high = load_block(weight, index, mask, tl.int16, MASKED).to(tl.int32) << 16
            wide = (high + remainder).to(tl.float32, bitcast=True)
        else:
            low = load_block(weight, index, mask, TYPE, MASKED)
            wide = low.to(tl.float32)
            wide = tl.where(remainder == 0, wide, wide + remainder.to(tl.float32) * _half_unit(low))
    elif UPDATE == "kahan":
        wide = load_block(weight, index, mask, TYPE, MASKED).to(tl.float32)
        wide += load_block(extra, index, mask, TYPE, MASKED).to(tl.float32)
    else:
        wide = load_block(weight, index, mask, TYPE, MASKED).to(tl.float32)
    return wide


@triton.jit
def _half_unit(low):
    """2**-16 of the spacing at a float16, as a power of two made from its bits."""
    field = tl.maximum((low.to(tl.int16, bitcast=True).to(tl.int32) >> 10) & 0x1F, 1)
    return ((field + 86) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half_remainder(wide, low):
    """The difference in those units, rounded to a whole number by adding and taking away 1.5 * 2**23."""
    field = tl.maximum((low.to(tl.int16, bitcast=True).to(tl.int32) >> 10) & 0x1F, 1)
    units = (wide - low.to(tl.float32)) * ((168 - field) << 23).to(tl.float32, bitcast=True)
    return (units + 12582912.0) - 12582912.0


@triton.jit
def store_weight(
    weight, extra, index, mask, w, seed, step, stream, first,
    UPDATE: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if TYPE == tl.float32:
        _store(weight, index, mask, w, TYPE, MASKED)
    elif UPDATE == "exact":
        bits = w.to(tl.int32, bitcast=True)
        finite = (bits & 0x7FFFFFFF) < 0x7F800000
        if TYPE == tl.bfloat16:
            remainder = (bits << 16) >> 16
            high = (bits - remainder) >> 16
            special = _round_nearest(w, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
            _store(weight, index, mask, tl.where(finite, high, special).to(tl.int16), tl.int16, MASKED)
            _store(extra, index, mask, tl.where(finite, remainder, 0).to(tl.int16), tl.int16, MASKED)
        else:
            low = w.to(tl.float16)
            pattern = low.to(tl.int16, bitcast=True).to(tl.int32)
            kept = (pattern & 0x7FFF) < 0x7C00
            above = tl.where(w > 0, pattern + 1, pattern - 1)
            pattern = tl.where(kept & (_half_remainder(w, low) > 32767.0), above, pattern)
            low = pattern.to(tl.int16).to(tl.float16, bitcast=True)
            remainder = tl.where(kept, _half_remainder(w, low), 0.0)
            _store(weight, index, mask, low, TYPE, MASKED)
            _store(extra, index, mask, remainder.to(tl.int16), tl.int16, MASKED)
    elif UPDATE == "stochastic":
        words = _random_words(index, first, seed, step, stream, BLOCK)
        _store(weight, index, mask, _round_stochastic(w, words, TYPE).to(TYPE), TYPE, MASKED)
    else:
        low = _round_nearest(w, TYPE)
        _store(weight, index, mask, low, TYPE, MASKED)
        if UPDATE == "kahan":
            _store(extra, index, mask, _round_nearest(w - low.to(tl.float32), TYPE), TYPE, MASKED)


@triton.jit
def _round_nearest(x, TYPE: tl.constexpr):
    """Nearest 16-bit number, ties to even; bfloat16 by its bits, because Triton's interpreter cuts them off."""
    if TYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        special = (bits >> 16) | 0x40  # a NaN stays one, whatever its low bits were
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        low = tl.where(nan, special, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        low = x.to(tl.float16)
    return low


@triton.jit
def _random_words(index, first, seed, step, stream, BLOCK: tl.constexpr):
    """The words of numerics/philox.py: word i is the (i mod 4)-th of counter i // 4."""
    if first % 4 == 0:
        words = _whole_counters((first + tl.min(index, axis=0)) // 4, seed, step, stream, BLOCK)
    else:
        words = _parts_of_counters(first + index, seed, step, stream)
    return words


@triton.jit
def _whole_counters(counter, seed, step, stream, BLOCK: tl.constexpr):
    """Each counter is computed once and gives four neighbours."""
    a, b, c, d = _philox(counter + tl.arange(0, BLOCK // 4), seed, step, stream)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])


@triton.jit
def _parts_of_counters(index, seed, step, stream):
    """A shard that begins in the middle of a counter takes one word of four."""
    a, b, c, d = _philox(index >> 2, seed, step, stream)
    lane = index & 3
    return tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))


@triton.jit
def _philox(counter, seed, step, stream):
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    return tl.philox(seed, low, high, zero + step.to(tl.uint32), zero + stream.to(tl.uint32))


@triton.jit
def _rounds_up(words, chance):
    """Whether a word is below 2**32 times the chance, which is at least 0 and below 1."""
    return words < (chance * 4294967296.0).to(tl.uint32)


@triton.jit
def _round_stochastic(x, words, TYPE: tl.constexpr):
    """Round float32 to the type's grid, up where the word is below the fraction; as numerics/rounding.py."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if TYPE == tl.bfloat16:
        fraction = (magnitude << 16).to(tl.uint32, bitcast=True)
        up = (words < fraction).to(tl.int32)
        rounded = ((magnitude >> 16) + up) << 16
    else:
        field = tl.maximum(magnitude >> 23, 113)
        quotient = magnitude.to(tl.float32, bitcast=True) * ((264 - field) << 23).to(tl.float32, bitcast=True)
        below = tl.floor(quotient)
        spacing = ((field - 10) << 23).to(tl.float32, bitcast=True)
        value = tl.where(_rounds_up(words, quotient - below), below + 1.0, below) * spacing
        value = tl.where(value > 65504.0, float("inf"), value)
        rounded = value.to(tl.int32, bitcast=True)
    signed = (rounded | (bits & (-2147483648))).to(tl.float32, bitcast=True)
    return tl.where(magnitude < 0x7F800000, signed, x)
