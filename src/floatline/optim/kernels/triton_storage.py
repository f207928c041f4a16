"""How the kernels read and write weights and states: the split, rounding and random words of the torch side."""

import triton
import triton.language as tl


@triton.jit
def load_block(address, index, mask, TYPE: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(address.to(tl.pointer_type(TYPE)) + index, mask=mask, other=0.0)
    else:
        # Said of the pointer: said of the address, it is lost in the cast, and every load is split up.
        x = tl.load(tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16) + index)
    return x


@triton.jit
def _store(address, index, mask, value, TYPE: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        tl.store(address.to(tl.pointer_type(TYPE)) + index, value, mask=mask)
    else:
        tl.store(tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16) + index, value)


@triton.jit
def load_state(
    address, scale, start, index, mask,
    STATES: tl.constexpr, SIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A state as float32; optim/storage.py says how the narrow forms keep it."""
    if STATES == "fp32":
        x = load_block(address, index, mask, tl.float32, MASKED)
    elif STATES == "bf16":
        x = load_block(address, index, mask, tl.bfloat16, MASKED).to(tl.float32)
    else:
        # A program's block is a block of the scale; its root cannot underflow where it is divided.
        root = tl.sqrt(tl.load(scale.to(tl.pointer_type(tl.float32)) + start // BLOCK))
        if SIGNED:
            x = _small_to_float(load_block(address, index, mask, tl.int8, MASKED)) * (root * (1.0 / 127.0))
            x = x * tl.abs(x)
        else:
            code = _small_to_float(load_block(address, index, mask, tl.uint8, MASKED))
            x = code * code * (root * (1.0 / 65025.0))
            x = x * x
    return x


@triton.jit
def store_state(
    address, scale, start, index, mask, x, chance,
    STATES: tl.constexpr, SIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if STATES == "fp32":
        _store(address, index, mask, x, tl.float32, MASKED)
    elif STATES == "bf16":
        _store(address, index, mask, _round_bfloat16(x, chance), tl.int16, MASKED)
    else:
        _store_int8(address, scale, start, index, mask, x, chance, SIGNED, BLOCK, MASKED)


@triton.jit
def _store_int8(
    address, scale, start, index, mask, x, chance, SIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """The code below or above, drawn without a division, and turned to a whole number without a conversion.

    With a random u, a signed code is the smallest k for which power <= k**2 + u * (2 * k + 1): that is the ceiling of
    sqrt(power - u * (1 - u)) - u. Here power and root are shares of 127**2 and 127, and draw is (u - 1/2) / 127. A
    square's code is the one below, found by rounding, and one more where the draw is below the share of the distance.
    """
    if MASKED:
        x = tl.where(mask, x, 0.0)
    # Of numbers above 0 the largest has the largest bits, and whole numbers are compared in fewer steps.
    size = x.to(tl.int32, bitcast=True)
    if SIGNED:
        size = size & 0x7FFFFFFF
    largest = tl.max(size, axis=0).to(tl.float32, bitcast=True)
    # 1 / largest must be finite: a block whose largest is subnormal is kept against the smallest normal number.
    normal = tl.where(largest < 1.1754943508222875e-38, 1.1754943508222875e-38, largest)
    tl.store(scale.to(tl.pointer_type(tl.float32)) + start // BLOCK, tl.where(largest == 0.0, 0.0, normal))
    inverse = 1.0 / normal
    if SIGNED:
        draw = tl.fma(_half_draw(chance), 2.0 / 127.0, -0.5 / 127.0)
        power = tl.fma(tl.abs(x), inverse, tl.fma(draw, draw, -0.25 / 16129.0))
        root = tl.sqrt(tl.minimum(tl.maximum(power, 0.0), 1.0)) - draw
        sign = x.to(tl.int32, bitcast=True) & (-2147483648)
        root = (root.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        # Slightly short of 127: no rounding error makes a code of 128, and a chance is at most 6e-5 too small.
        code = tl.fma(root, 126.99994, 12582912.0).to(tl.int32, bitcast=True)
        _store(address, index, mask, code.to(tl.int8), tl.int8, MASKED)
    else:
        share = x * inverse
        # Slightly short of 255: the code below is at most 254. A whole number may become the one before, and goes up.
        shifted = tl.fma(tl.sqrt(tl.sqrt(share)), 254.9998, -0.5) + 12582912.0
        below = shifted - 12582912.0
        square = below * below
        # The distance to the next code is middle * (middle**2 + 1) / 2. Above 0 it is taken as 0: what is more goes up.
        middle = tl.fma(below, 2.0, tl.minimum(below, 1.0))
        distance = (_half_draw(chance) * middle) * tl.fma(middle, middle, 1.0)
        up = distance < tl.fma(-square, square, share * 4228250625.0)
        code = tl.where(up, shifted + 1.0, shifted)
        _store(address, index, mask, code.to(tl.int32, bitcast=True).to(tl.uint8), tl.uint8, MASKED)


@triton.jit
def _half_draw(chance):
    """Half of the number from 0 to 1 that 16 random bits and a half are: the lowest bits of a float32 above 64."""
    return (chance.to(tl.int32) | 0x42800000).to(tl.float32, bitcast=True) - (64.0 - 2.0**-18)


@triton.jit
def _small_to_float(x):
    """A whole number from -2**22 to 2**22, placed in the low bits of 1.5 * 2**23: conversions are slow on a GPU."""
    return (x.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def load_weight(weight, extra, index, mask, UPDATE: tl.constexpr, TYPE: tl.constexpr, MASKED: tl.constexpr):
    """The float32 weight that the update works on; optim/storage.py says what it is where the extra is another's."""
    if TYPE == tl.float32:
        wide = load_block(weight, index, mask, TYPE, MASKED)
    elif UPDATE == "exact":
        remainder = load_block(extra, index, mask, tl.int16, MASKED).to(tl.int32)
        if TYPE == tl.bfloat16:
            high = load_block(weight, index, mask, tl.int16, MASKED).to(tl.int32) << 16
            joined = (high + remainder).to(tl.float32, bitcast=True)
            wide = tl.where(joined == joined, joined, high.to(tl.float32, bitcast=True))
        else:
            tl.static_assert(TYPE == tl.float16)
            wide = load_block(weight, index, mask, TYPE, MASKED).to(tl.float32)
            bits = wide.to(tl.int32, bitcast=True)
            # 2**e at the weight; an inf has 2**15, so that a remainder of 0 stays one.
            power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
            power = tl.minimum(tl.maximum(power, 0.00006103515625), 32768.0)
            joined = tl.fma(remainder.to(tl.float32) * 1.4901161193847656e-08, power, wide).to(tl.int32, bitcast=True)
            wide = (joined + ((joined ^ bits) & (-2147483648))).to(tl.float32, bitcast=True)
    elif UPDATE == "kahan":
        wide = load_block(weight, index, mask, TYPE, MASKED).to(tl.float32)
        rest = load_block(extra, index, mask, TYPE, MASKED).to(tl.float32)
        power = (wide.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        if TYPE == tl.bfloat16:
            room = power - tl.abs(rest) * 256.0
        else:
            room = power - tl.abs(rest) * 2048.0
        wide += tl.where(room >= 0.0, rest, 0.0)
    else:
        wide = load_block(weight, index, mask, TYPE, MASKED).to(tl.float32)
    return wide


@triton.jit
def _half_remainder(wide, low):
    """The difference in 2**-16 spacings, rounded to a whole number: the low bits of its sum with 1.5 * 2**-2."""
    near = low.to(tl.float32)
    inverse = (near.to(tl.int32, bitcast=True) ^ 0x7F800000) & 0x7F800000  # of 2**(1-e)
    inverse = tl.minimum(inverse.to(tl.float32, bitcast=True), 32768.0)
    return tl.fma(wide - near, inverse, 0.375).to(tl.int32, bitcast=True)


@triton.jit
def _above_a_tie(wide, low, remainder):
    """The neighbour above where a remainder is +32768, one more than int16 holds."""
    pattern = low.to(tl.int16, bitcast=True).to(tl.int32)
    above = tl.where(wide > 0, pattern + 1, pattern - 1)
    tie = (remainder > 32767 + 0x3EC00000) & (tl.abs(low.to(tl.float32)) < float("inf"))
    return tl.where(tie, above, pattern).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def store_weight(
    weight, extra, start, index, mask, w, seed, step, stream, first,
    UPDATE: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr,
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
            remainder = _half_remainder(w, low)
            if tl.max(remainder, axis=0) > 32767 + 0x3EC00000:  # a tie, inf or NaN: once in 60 blocks
                low = _above_a_tie(w, low, remainder)
                remainder = tl.where(tl.abs(low.to(tl.float32)) < float("inf"), _half_remainder(w, low), 0)
            _store(weight, index, mask, low, TYPE, MASKED)
            _store(extra, index, mask, remainder.to(tl.int16), tl.int16, MASKED)
    elif UPDATE == "stochastic":
        words = random_words(start, index, first, seed, step, stream, BLOCK, WHOLE)
        if TYPE == tl.bfloat16:
            _store(weight, index, mask, _round_bfloat16(w, words >> 16), tl.int16, MASKED)
        else:
            _store(weight, index, mask, _round_float16(w, words).to(tl.float16), tl.float16, MASKED)
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
def random_words(start, index, first, seed, step, stream, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """The words of numerics/rounding.py: word i is the (i mod 4)-th of counter i // 4."""
    if WHOLE:
        words = _whole_counters((first + start) // 4, seed, step, stream, BLOCK)
    else:
        words = _parts_of_counters(first + index, seed, step, stream)
    return words


@triton.jit
def state_words(start, index, first, seed, step, stream, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """The words of `Wave.state_words`: two neighbours share one, and the second has its halves exchanged."""
    if WHOLE:
        pairs = _whole_counters((first + start) // 8, seed, step, stream, BLOCK // 2)
        words = tl.reshape(tl.join(pairs, _exchanged(pairs)), [BLOCK])
    else:
        place = first + index
        words = _parts_of_counters(place >> 1, seed, step, stream)
        words = tl.where(place % 2 == 0, words, _exchanged(words))
    return words


@triton.jit
def _exchanged(words):
    return (words >> 16) | (words << 16)


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
    """`philox` of numerics/rounding.py; with whole products of 64 bits, which are one instruction."""
    a = (counter & 0xFFFFFFFF).to(tl.uint32)
    b = (counter >> 32).to(tl.uint32)
    zero = a * 0
    c = zero + step.to(tl.uint32)
    d = zero + stream.to(tl.uint32)
    wide = (step.to(tl.int64) * 0 + seed).to(tl.uint64)  # a seed of 1 is no tensor
    low = wide.to(tl.uint32)
    high = (wide >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        first = a.to(tl.uint64) * 0xD2511F53
        second = c.to(tl.uint64) * 0xCD9E8D57
        a = (second >> 32).to(tl.uint32) ^ b ^ low
        c = (first >> 32).to(tl.uint32) ^ d ^ high
        b = second.to(tl.uint32)
        d = first.to(tl.uint32)
        low = tl.add(low, 0x9E3779B9, sanitize_overflow=False)
        high = tl.add(high, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d


@triton.jit
def _round_bfloat16(x, chance):
    """The bits of a bfloat16, up where 16 random bits are below the 16 that are cut off; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    # The sum carries into the upper half exactly where chance < low bits.
    rounded = (bits + (chance.to(tl.int32) ^ 0xFFFF)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _round_float16(x, words):
    """Round float32 to float16's grid, up where the word is below the fraction; as numerics/rounding.py."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    field = tl.maximum(magnitude >> 23, 113)
    quotient = magnitude.to(tl.float32, bitcast=True) * ((264 - field) << 23).to(tl.float32, bitcast=True)
    below = tl.floor(quotient)
    spacing = ((field - 10) << 23).to(tl.float32, bitcast=True)
    up = words < ((quotient - below) * 4294967296.0).to(tl.uint32)
    value = tl.where(up, below + 1.0, below) * spacing
    value = tl.where(value > 65504.0, float("inf"), value)
    signed = (value.to(tl.int32, bitcast=True) | (bits & (-2147483648))).to(tl.float32, bitcast=True)
    return tl.where(magnitude < 0x7F800000, signed, x)
