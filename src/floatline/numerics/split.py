"""An FP32 number as a 16-bit number the model can use and the 16 bits that were rounded away."""

from __future__ import annotations

import torch
from torch import Tensor

from floatline.errors import TensorError
from floatline.numerics.compiled import is_worth_compiling, run_loop, split_loops

SPLIT_DTYPES = (torch.float16, torch.bfloat16)


def split_master(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split float32 into a 16-bit weight, the nearest one, and an int16 remainder.

    Numerics:
        master == weight + remainder * spacing(weight) / 65536, where spacing is the distance to the weight's
        neighbour away from zero (2**-24 for float16's subnormals).
        bfloat16: exact for every float32, subnormals and -0.0 included. The weight is the nearest bfloat16,
        ties away from zero; it is inf where the master is nearer to 2**128 than to bfloat16's largest number,
        and the remainder still holds the master.
        float16: exact for 2**-17 <= |master| < 65520; below 2**-17 within 2**-41. From 65520 up the weight is
        inf and the master is lost. The weight is the nearest float16; of two equally near ones it is the even
        one, or the one above where int16 cannot hold the remainder +32768 (below 2**-17 that neighbour is also
        taken for a value up to 2**-41 short of the tie).
        inf and NaN: the weight is inf or a NaN, the remainder 0.
        Checked by tests/numerics/test_split.py over every exponent and every float16 tie.

    Args:
        master: float32 tensor; not modified.
        dtype: torch.float16 or torch.bfloat16.

    Returns:
        The weight, and the remainder as int16; both of master's shape.
    """
    if master.dtype != torch.float32:
        raise TensorError(f"Cannot split a {master.dtype} tensor. Convert it to torch.float32 first.")
    if dtype == torch.bfloat16:
        return _split_bfloat16(master)
    if dtype == torch.float16:
        return _split_float16(master)
    raise TensorError(f"Cannot split float32 into {dtype}. Use torch.float16 or torch.bfloat16.")


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Put the float32 together again; the inverse of `split_master`.

    Numerics:
        One exact product and one exact sum: the result is the float32 that was split, bit for bit within
        the bounds stated there. inf and NaN weights come back as they are, except that a bfloat16 inf
        with a remainder below 0 is the large finite number it was made from.
        Any other pair, whose weight was changed by somebody else: within half a spacing of a finite weight, with the
        weight's sign. A bfloat16 zero with a remainder below 0, whose bits together are a NaN, is that zero; a
        float16 zero takes the remainder's magnitude; 65504 with one above 32763 is 65520.
        Checked by tests/optim/test_written_weights.py over all pairs of a finite weight and a remainder.

    Args:
        weight: float16 or bfloat16 tensor.
        remainder: int16 tensor of the same shape.
    """
    if weight.dtype == torch.bfloat16:
        high = weight.view(torch.int16).to(torch.int32) << 16
        joined = (high + remainder.to(torch.int32)).view(torch.float32)
        return torch.where(joined.isnan(), high.view(torch.float32), joined)
    if weight.dtype == torch.float16:
        wide = weight.to(torch.float32)
        # A master has its weight's sign: -0.0 + 0.0 alone would be +0.0.
        return (wide + remainder.to(torch.float32) * _unit(weight)).copysign_(wide)
    raise TensorError(f"Cannot join a {weight.dtype} weight. Use torch.float16 or torch.bfloat16.")


def _split_bfloat16(master: Tensor) -> tuple[Tensor, Tensor]:
    bits = master.view(torch.int32)
    remainder = bits.to(torch.int16)  # the low half, as a signed number
    weight = ((bits - remainder.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)
    special = ~master.isfinite()
    weight = torch.where(special, master.to(torch.bfloat16), weight)
    return weight, torch.where(special, 0, remainder)


def _split_float16(master: Tensor) -> tuple[Tensor, Tensor]:
    weight = master.to(torch.float16)
    remainder = _remainder(master, weight)
    # A tie that was rounded down leaves +32768, one more than int16 holds: take the neighbour above instead,
    # which is the next bit pattern of a positive number and the one before of a negative number.
    bits = weight.view(torch.int16)
    above = torch.where(master > 0, bits + 1, bits - 1).view(torch.float16)
    weight = torch.where((remainder > 32767) & weight.isfinite(), above, weight)
    remainder = _remainder(master, weight)
    return weight, torch.where(weight.isfinite(), remainder, 0).to(torch.int16)


def _remainder(master: Tensor, weight: Tensor) -> Tensor:
    """The difference in units of 2**-16 spacings, rounded to a whole number; a float."""
    return torch.round((master - weight.to(torch.float32)) / _unit(weight))


def _unit(weight: Tensor) -> Tensor:
    """2**-16 of the spacing at a float16 weight: 2**(max(e, 1) - 41) with e its exponent field."""
    field = ((weight.view(torch.int16) >> 10) & 0x1F).to(torch.int32).clamp_(min=1)
    return ((field - 41 + 127) << 23).view(torch.float32)


_SPECIAL = 0x7F800000  # the bits of float32's inf
_TOO_LARGE = 0x477FF000  # the bits of 65520, the first number that becomes inf in float16


def split_many(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`split_master`, bit for bit; without its selections where no number needs them.

    Numerics:
        The same weight and remainder as `split_master` for every float32. Checked by tests/numerics/test_fast_split.py
        over every exponent, every float16 tie and special values.

    Args:
        master: float32 tensor; not modified.
        dtype: torch.float16 or torch.bfloat16.
    """
    loops = split_loops() if is_worth_compiling(master) else None
    if loops is not None:
        weight, remainder = torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)
        loop = loops.split_bfloat16 if dtype == torch.bfloat16 else loops.split_float16
        run_loop(loop, [((master, weight, remainder), ())])
        return weight, remainder
    bits = master.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    limit = _SPECIAL if dtype == torch.bfloat16 else _TOO_LARGE
    if not master.is_cpu or (master.numel() and int(magnitude.max()) >= limit):
        return split_master(master, dtype)
    if dtype == torch.bfloat16:
        remainder = bits.to(torch.int16)
        weight = bits.sub(remainder.to(torch.int32)).bitwise_right_shift_(16).to(torch.int16)
        return weight.view(torch.bfloat16), remainder
    return _split_half(bits, magnitude)


def widen_many(tensor: Tensor) -> Tensor:
    """A tensor as float32: what `.to` gives, which takes float16 one by one on some CPUs."""
    loops = split_loops() if tensor.dtype == torch.float16 and is_worth_compiling(tensor) else None
    if loops is None:
        return tensor.to(torch.float32)
    wide = torch.empty_like(tensor, dtype=torch.float32)
    run_loop(loops.widen_float16, [((tensor, wide), ())])
    return wide


def join_many(weight: Tensor, remainder: Tensor) -> Tensor:
    """`join_master`, bit for bit; without its selection where no number needs it.

    Numerics:
        The same as `join_master` for every pair. Checked by tests/optim/test_written_weights.py.

    Args:
        weight: float16 or bfloat16 tensor.
        remainder: int16 tensor of the same shape.
    """
    if weight.dtype not in SPLIT_DTYPES or not weight.is_cpu:
        return join_master(weight, remainder)
    loops = split_loops() if is_worth_compiling(weight, remainder) else None
    if loops is not None:
        master = torch.empty_like(weight, dtype=torch.float32)
        loop = loops.join_bfloat16 if weight.dtype == torch.bfloat16 else loops.join_float16
        run_loop(loop, [((weight, remainder, master), ())])
        return master
    if weight.dtype == torch.bfloat16:
        bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(remainder)
        joined = bits.view(torch.float32)
        # A finite sum has no NaN among its terms: no remainder that cannot belong to its weight.
        return joined if bool(joined.sum().isfinite()) else join_master(weight, remainder)
    wide = weight.to(torch.float32)
    field = weight.view(torch.int16).bitwise_and(0x7C00).bitwise_right_shift_(10).to(torch.int32).clamp_(min=1)
    unit = field.add_(86).bitwise_left_shift_(23).view(torch.float32)
    return unit.mul_(remainder).add_(wide).copysign_(wide)


def _split_half(bits: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """With |x| = q spacings and a rest: q and the exponent give float16's bits, the rest the remainder."""
    sign = bits.bitwise_right_shift(31).bitwise_or_(1)
    field = magnitude.bitwise_right_shift(23).clamp_(min=113)
    inverse = field.neg().add_(264).bitwise_left_shift_(23).view(torch.float32)
    quotient = inverse.mul_(magnitude.view(torch.float32))
    whole = quotient.round()
    rest = quotient.sub_(whole).mul_(65536).round_().to(torch.int32)
    count = whole.to(torch.int32)
    # 2048 spacings are the first number with twice the spacing; the rest is even there.
    rest = rest.bitwise_right_shift_(count.bitwise_right_shift(11)).mul_(sign)
    # int16 ends at 32767: of two equally near numbers take the one above.
    tie = rest.bitwise_right_shift(15).clamp_(min=0)
    count += tie * sign
    rest -= tie.bitwise_left_shift_(16)
    half = field.sub_(113).bitwise_left_shift_(10).add_(count)
    half |= bits.bitwise_right_shift(16).bitwise_and_(0x8000)
    return half.to(torch.int16).view(torch.float16), rest.to(torch.int16)
