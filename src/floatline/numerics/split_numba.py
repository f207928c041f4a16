"""The exact split and its inverse for one number and for many, compiled by numba when they are first used (1 s)."""

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# numba would compute in 64 bits: every step says that it is 32.
i16, i32, f32 = np.int16, np.int32, np.float32
# Added to a number below 2**22, it leaves the nearest whole number, to even where it is halfway, in the lowest bits.
_WHOLE, _WHOLE_BITS = f32(12582912.0), i32(0x4B400000)
_SIGN = i32(-(2**31))


@intrinsic
def widen_half(context, half):
    """The float32 of a float16's bits; the processor's own instruction."""
    del context, half
    return types.float32(types.int16), lambda _, b, __, args: b.fpext(b.bitcast(args[0], ir.HalfType()), ir.FloatType())


@intrinsic
def narrow_half(context, number):
    """The bits of the float16 nearest to a float32, of the even one where two are."""
    del context, number
    return types.int16(types.float32), lambda _, b, __, args: b.bitcast(
        b.fptrunc(args[0], ir.HalfType()), ir.IntType(16)
    )


@intrinsic
def as_float(context, bits):
    """The float32 with these bits."""
    del context, bits
    return types.float32(types.int32), lambda _, b, __, args: b.bitcast(args[0], ir.FloatType())


@intrinsic
def as_bits(context, number):
    """The bits of a float32."""
    del context, number
    return types.int32(types.float32), lambda _, b, __, args: b.bitcast(args[0], ir.IntType(32))


@numba.njit(inline="always")
def _exponent(half):
    """The exponent field of a float16; a subnormal's counts as 1."""
    return i32(max(i32(i32(half >> i32(10)) & i32(31)), i32(1)))


@numba.njit(inline="always")
def join_half(weight, remainder):
    """`join_master` of a float16 weight, given as bits."""
    wide = widen_half(weight)
    unit = as_float(i32(i32(_exponent(i32(weight)) + i32(86)) << i32(23)))
    joined = as_bits(f32(wide + f32(f32(i32(remainder)) * unit)))
    return as_float(i32(i32(joined & ~_SIGN) | i32(as_bits(wide) & _SIGN)))


@numba.njit(inline="always")
def split_half(master):
    """`split_master` into a float16, as bits, and its remainder."""
    weight = i32(narrow_half(master))
    inverse = as_float(i32(i32(i32(168) - _exponent(weight)) << i32(23)))
    off = f32(f32(master - widen_half(i16(weight))) * inverse)
    rest = i32(as_bits(f32(off + _WHOLE)) - _WHOLE_BITS)
    finite = i32(i32(weight & i32(0x7C00)) != i32(0x7C00))
    # int16 ends at 32767: of two equally near numbers take the one above. It has the same spacing: of 2047 and 2048
    # spacings the even one is above already.
    tie = i32(i32(rest == i32(32768)) & finite)
    sign = i32(weight >> i32(31))
    above = i32(weight + i32(i32(tie ^ sign) - sign))
    return i16(above), i16(i32(i32(rest - i32(tie << i32(16))) & i32(-finite)))


@numba.njit(inline="always")
def join_brain(weight, remainder):
    """`join_master` of a bfloat16 weight, given as bits."""
    high = i32(i32(weight) << i32(16))
    bits = i32(high + i32(remainder))
    return as_float(high if i32(bits & ~_SIGN) > i32(0x7F800000) else bits)


@numba.njit(inline="always")
def split_brain(master):
    """`split_master` into a bfloat16, as bits, and its remainder; a NaN keeps its sign and becomes quiet."""
    bits = as_bits(master)
    size = i32(bits & ~_SIGN)
    rest = i32(i16(bits))
    special = size >= i32(0x7F800000)
    quiet = i32(i32(bits >> i32(16)) | i32(i32(size > i32(0x7F800000)) << i32(6)))
    weight = quiet if special else i32(i32(bits - rest) >> i32(16))
    return i16(weight), i16(i32(0) if special else rest)


def converts_half() -> bool:
    """Whether numba's code converts float16 by instructions, not by functions of a library that is not loaded."""
    probe = numba.njit("int16(int16)")(lambda half: narrow_half(f32(widen_half(half) * f32(3))))
    code = "".join(probe.inspect_asm().values())
    return not any(name in code for name in ("extendhfsf", "truncsfhf", "gnu_h2f", "gnu_f2h"))


@numba.njit(nogil=True)
def widen_float16(narrow, wide):
    """float16 numbers, given as bits, as float32."""
    for i in range(narrow.size):
        wide[i] = widen_half(narrow[i])


@numba.njit(nogil=True)
def join_float16(weight, remainder, master):
    """Masters of float16 weights, given as bits."""
    for i in range(weight.size):
        master[i] = join_half(weight[i], remainder[i])


@numba.njit(nogil=True)
def join_bfloat16(weight, remainder, master):
    """Masters of bfloat16 weights, given as bits."""
    for i in range(weight.size):
        master[i] = join_brain(weight[i], remainder[i])


@numba.njit(nogil=True)
def split_float16(master, weight, remainder):
    """float16 weights, as bits, and remainders of masters."""
    for i in range(master.size):
        weight[i], remainder[i] = split_half(master[i])


@numba.njit(nogil=True)
def split_bfloat16(master, weight, remainder):
    """bfloat16 weights, as bits, and remainders of masters."""
    for i in range(master.size):
        weight[i], remainder[i] = split_brain(master[i])
