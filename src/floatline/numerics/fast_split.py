"""The exact split for many finite numbers at a time, in whole-number steps: several times faster on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from floatline.numerics.split import SPLIT_DTYPES, join_master, split_master

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
