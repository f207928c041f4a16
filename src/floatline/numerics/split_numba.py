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
_EXPONENT, _SMALLEST = i32(0x7F800000), i32(0x38800000)  # of float32; 2**-14, float16's smallest normal number
# A float16's unit is 2**-26 of the power of two below it: what its exponent is less, and what 1/unit's adds up to.
_SHIFT, _INVERSE = i32(26 << 23), i32((280 << 23) - 2**32)
_FMULADD = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 3)


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


@intrinsic
def _multiply_add(context, x, y, z):
    """x·y + z where the product is exact: in one instruction where the processor has one."""
    del context, x, y, z
    real = types.float32

    def emit(_, b, __, args):
        return b.call(b.module.declare_intrinsic("llvm.fmuladd", [ir.FloatType()], _FMULADD), args)

    return real(real, real, real), emit


@numba.njit(inline="always")
def _binade(wide):
    """The power of two below a widened float16, as bits; a subnormal's is the smallest normal number's."""
    field = i32(as_bits(wide) & _EXPONENT)
    return field if field > _SMALLEST else _SMALLEST  # numba's max keeps vectors out of longer loops


@numba.njit(inline="always")
def join_half(weight, remainder):
    """`join_master` of a float16 weight, given as bits."""
    wide = widen_half(weight)
    unit = as_float(i32(_binade(wide) - _SHIFT))
    joined = as_bits(_multiply_add(f32(i32(remainder)), unit, wide))
    return as_float(i32(i32(joined & ~_SIGN) | i32(as_bits(wide) & _SIGN)))


@numba.njit(inline="always")
def split_half(master):
    """`split_master` into a float16, as bits, and its remainder."""
    weight = i32(narrow_half(master))
    wide = widen_half(i16(weight))
    inverse = as_float(i32(_INVERSE - _binade(wide)))
    rest = i32(as_bits(_multiply_add(f32(master - wide), inverse, _WHOLE)) - _WHOLE_BITS)
    # int16 ends at 32767: of two equally near numbers take the one above. It has the same spacing: of 2047 and 2048
    # spacings the even one is above already.
    tie = i32(-i32(rest == i32(32768)))
    above = i32(weight + i32(tie & i32(i32(weight >> i32(31)) | i32(1))))
    finite = i32(-i32(i32(weight & i32(0x7C00)) != i32(0x7C00)))
    return i16(above), i16(i32(rest & finite))


@numba.njit(inline="always")
def join_brain(weight, remainder):
    """`join_master` of a bfloat16 weight, given as bits."""
    high = i32(i32(weight) << i32(16))
    joined = as_float(i32(high + i32(remainder)))
    return as_float(high) if np.isnan(joined) else joined


@numba.njit(inline="always")
def split_brain(master):
    """`split_master` into a bfloat16, as bits, and its remainder; a NaN keeps its sign and becomes quiet."""
    bits = as_bits(master)
    # inf needs no selection: its low bits are 0, as its remainder is.
    near = i32(bits | i32(0x400000)) if np.isnan(master) else i32(bits + i32(0x8000))
    return i16(i32(near >> i32(16))), i16(i32(0) if np.isnan(master) else bits)


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
