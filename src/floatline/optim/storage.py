"""How a weight and a state live in memory: 16-bit weights in four ways, states in 32, 16 or 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from floatline.numerics.split import join_many, split_many
from floatline.optim.survey import BLOCK

UPDATES = ("exact", "stochastic", "kahan", "nearest")
STATES = ("fp32", "bf16", "int8")
EXTRAS = {"exact": "remainder", "kahan": "compensation"}
# Half spacings in the power of two at or below a weight.
_HALF_SPACINGS = {torch.float16: 2048.0, torch.bfloat16: 256.0}
# States that are never negative need no sign bit, and must not become zero: they stand in a denominator.
NONNEGATIVE = frozenset({"exp_avg_sq"})


def new_extra(weight: Tensor, update: str) -> dict[str, Tensor]:
    """What has to stand beside a new weight: nothing, or a remainder of zeros."""
    if weight.dtype == torch.float32 or update not in EXTRAS:
        return {}
    return {EXTRAS[update]: _zeros(weight, torch.int16 if update == "exact" else weight.dtype)}


def new_state(weight: Tensor, name: str, states: str) -> dict[str, Tensor]:
    """A state of zeros for a weight, with its scales where it is stored in 8 bits."""
    if states == "fp32":
        return {name: _zeros(weight, torch.float32)}
    if states == "bf16":
        return {name: _zeros(weight, torch.bfloat16)}
    codes = _zeros(weight, torch.uint8 if name in NONNEGATIVE else torch.int8)
    scales = torch.zeros(-(-weight.numel() // BLOCK), dtype=torch.float32, device=weight.device)
    return {name: codes, f"{name}_scale": scales}


def load_weight(weight: Tensor, extra: Tensor | None) -> Tensor:
    """The float32 number that a weight stands for.

    Numerics:
        With a remainder: exactly the master that was split (see `split_master`). With a compensation: their sum.
        With neither: the weight.
        A remainder or compensation of another weight: within half a spacing of the weight where that is finite,
        whatever the extra is (see `join_master`). A compensation of more than half a spacing, inf or NaN is
        left out; `store_weight` makes none but beside a weight that is inf or NaN.
        Checked by tests/optim/test_written_weights.py.

    Args:
        weight: float32, float16 or bfloat16.
        extra: int16 remainder, compensation of the weight's dtype, or None.
    """
    if extra is None:
        return weight.to(torch.float32)
    if extra.dtype == torch.int16:
        return join_many(weight, extra)
    wide, rest = weight.to(torch.float32), extra.to(torch.float32)
    # Half a spacing is a power of two below the weight's own; room is NaN where both are inf.
    power = wide.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    room = power.sub_(rest.abs(), alpha=_HALF_SPACINGS[weight.dtype])
    # Reading costs nothing on a CPU, and selecting costs more there than all the rest.
    if not (room.is_cpu and room.numel() and bool(room.min() >= 0)):
        rest = torch.where(room >= 0, rest, 0.0)
    return wide.add_(rest)


def store_weight(
    master: Tensor, dtype: torch.dtype, update: str, words: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The weight for a float32 number, and what has to stand beside it.

    Numerics:
        exact: nothing is lost within the bounds of `split_master`.
        kahan: the weight is the nearest one, the compensation the nearest number to what that lost: together
        they hold 16 bits of the master in bfloat16 and 22 in float16 (in float16 never finer than 2**-25).
        stochastic: unbiased; bit for bit `round_stochastic` with the same random words.
        nearest: an update below half the spacing at the weight is lost.
        Checked by tests/optim/test_storage.py.

    Args:
        master: float32; not modified.
        dtype: The weight's dtype.
        update: How the weight takes its update.
        words: For "stochastic", a random number of 32 bits for each element.
    """
    if dtype == torch.float32:
        return master, None
    if update == "exact":
        return split_many(master, dtype)
    if update == "stochastic" and words is not None:
        return round_by_words(master, dtype, words), None
    weight = master.to(dtype)
    if update == "kahan":
        return weight, (master - weight.to(torch.float32)).to(dtype)
    return weight, None


def load_state(stored: Tensor, scale: Tensor | None) -> Tensor:
    """A state as float32.

    Numerics:
        8 bits, with s the scale of the element's block: s · (code / 127)² with the code's sign, or
        s · (code / 255)⁴ for a state that is never negative.

    Args:
        stored: float32, bfloat16, int8 or uint8. 8-bit states are flat, whole blocks.
        scale: One float32 for each block of an 8-bit state.
    """
    if scale is None:
        return stored.to(torch.float32)
    codes = stored.view(-1, BLOCK).to(torch.float32)
    if stored.dtype == torch.uint8:
        part = (codes / 255).square_().square_()
    else:
        part = codes / 127
        part *= part.abs()
    return part.mul_(scale.unsqueeze(1)).view(-1)


def store_state(values: Tensor, dtype: torch.dtype, words: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A state in the form it is kept in, and the scales of its blocks.

    Numerics:
        8 bits are spent where a state needs them: it spreads over orders of magnitude within a block, so the
        codes are spaced by the square root (by the fourth root for squares) of value / largest in the block of
        256. A value is off by less than the distance between two codes: 2·sqrt(x·s)/127 + s/127² for signed
        states, at most 1.6 % of the block's largest; for squares 4 % of the value at 1/40 of the largest, 1.6 % at
        the largest.
        bfloat16 and 8-bit values are rounded up or down in proportion to the distance, so that the mean is the
        value: nearest rounding would freeze exp_avg_sq, which changes by 0.1 % a step where bfloat16's spacing is
        0.4 to 0.8 %. Without words they are rounded to nearest.
        A value of exp_avg_sq above zero stays above zero, at least s·255⁻⁴ ≈ 2.4e-10·s in 8 bits: zero would
        divide by eps alone.
        Checked by tests/optim/test_storage.py.

    Args:
        values: float32, not modified; flat, whole blocks where 8 bits are wanted.
        dtype: torch.float32, bfloat16, int8 or uint8 (for states that are never negative).
        words: A random number of 32 bits for each element, or None for nearest rounding.
    """
    if dtype == torch.float32:
        return values, None
    if dtype == torch.bfloat16:
        return (values.to(dtype) if words is None else round_by_words(values, dtype, words)), None
    blocks = values.view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1)
    share = blocks.abs() / torch.where(scale == 0, 1.0, scale).unsqueeze(1)
    if dtype == torch.uint8:
        power = share * 255.0**4
        below = power.sqrt().sqrt_().floor_()
        floor = below.square().square_()
        gap = (below + 1).square_().square_().sub_(floor)
    else:
        power = share * 127.0**2
        below = power.sqrt().floor_()
        floor = below.square()
        gap = 2 * below + 1
    chance = power.sub_(floor).div_(gap)
    if words is None:
        up = chance > 0.5
    else:
        up = words.view(-1, BLOCK) < (chance.nan_to_num_(0.0) * 2.0**32).to(torch.int64)
    codes = (below + up).nan_to_num_(0.0)
    if dtype == torch.uint8:
        codes = torch.maximum(codes, (blocks > 0).to(torch.float32)).clamp_(max=255)
    else:
        codes = torch.copysign(codes.clamp_(max=127), blocks)
    return codes.to(dtype).view(-1), scale


def read_state(value: Tensor, scale: Tensor | None) -> Tensor:
    """A stored state of any form as float32, with the same shape and order in memory; itself where it is float32.

    Args:
        value: float32, bfloat16, int8 or uint8.
        scale: One float32 for each block of an 8-bit state.
    """
    if scale is None:
        return value.to(torch.float32)
    flat = flat_view(value)
    wide = load_state(_padded(value.reshape(-1) if flat is None else flat), scale)[: value.numel()]
    return wide.as_strided(value.shape, value.stride()) if flat is not None else wide.view(value.shape)


def write_state(state: dict[str, Tensor], name: str, values: Tensor, words: Tensor | None = None) -> None:
    """Fill a state, which is dense in memory, from float32 values.

    Args:
        state: Holds the state, and its scales where it has some.
        name: Which.
        values: Of the state's shape.
        words: A random number of 32 bits for each element in the state's order in memory, or None for nearest rounding.
    """
    target = state[name]
    place = flat_view(target)
    if place is None:
        raise AssertionError("a state is dense in memory")
    if values.stride() != target.stride():  # blocks follow the state's order in memory
        values = torch.empty_strided(target.shape, target.stride(), device=target.device).copy_(values)
    flat = values.as_strided((values.numel(),), (1,))
    if words is not None and target.dtype != torch.bfloat16:
        words = _padded(words)
    stored, scale = store_state(flat if target.dtype == torch.bfloat16 else _padded(flat), target.dtype, words)
    place.copy_(stored[: target.numel()])
    if scale is not None:
        state[f"{name}_scale"].copy_(scale)


def _padded(flat: Tensor) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK))


def round_by_words(x: Tensor, dtype: torch.dtype, words: Tensor) -> Tensor:
    """`round_stochastic` to a 16-bit dtype for given random words, in whole-number steps.

    Numerics:
        Bit for bit the result of `round_stochastic`: up where the word is below 2**32 times the fraction of the
        spacing. Checked by tests/optim/test_storage.py.

    Args:
        x: float32 tensor; not modified.
        dtype: torch.float16 or torch.bfloat16.
        words: A number from 0 to 2**32 - 1 for each element; int64.
    """
    bits = x.view(torch.int32)
    if dtype == torch.bfloat16:
        up = (words >> 16) < (bits & 0xFFFF)
        rounded = ((bits >> 16) + up).to(torch.int16).view(torch.bfloat16)
        return torch.where(x.isfinite(), rounded, x.to(torch.bfloat16))
    # Powers of two from their exponent fields; below 2**-14 float16's spacing stays 2**-24.
    field = ((bits >> 23) & 0xFF).clamp_(min=113, max=200)
    quotient = x.abs() * ((264 - field) << 23).view(torch.float32)
    below = quotient.floor()
    up = words < ((quotient - below) * 2.0**32).nan_to_num_(0.0, 0.0).to(torch.int64)
    magnitude = (below + up) * ((field - 10) << 23).view(torch.float32)
    # Beyond 65504 the nearest float16 may still be 65504: it is inf as soon as rounding went up.
    magnitude = torch.where(magnitude > 65504.0, torch.inf, magnitude)
    return torch.where(x.isnan(), x, torch.copysign(magnitude, x)).to(torch.float16)


def flat_view(tensor: Tensor) -> Tensor | None:
    """The elements in the order they have in memory, as a view; None where the tensor has gaps or overlaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def _zeros(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros in the weight's memory order, so that one walk over memory serves both."""
    if flat_view(weight) is None:
        return torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    return torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=weight.device).zero_()
