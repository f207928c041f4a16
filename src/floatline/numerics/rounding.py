"""Rounding to 16 bits, to nearest and at random; the random bits are Philox's, drawn by a key and a place."""

from __future__ import annotations

import torch
from torch import Tensor

from floatline.errors import TensorError
from floatline.formats import Format, find_format

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], *, seed: int) -> tuple[Tensor, ...]:
    """Four 32-bit words for each 128-bit counter, under a 64-bit key.

    Numerics:
        Bit for bit the Philox-4x32-10 of Salmon et al. 2011 (doi:10.1145/2063384.2063405), checked against
        its published vectors by tests/numerics/test_philox.py. Words are kept in int64 tensors, 0 to 2**32 - 1:
        torch has no arithmetic on uint32, and int64 products wrap to the right low 64 bits.

    Args:
        counters: Four int64 tensors of one shape, each 0 to 2**32 - 1.
        seed: The key, 0 to 2**64 - 1.
    """
    a, b, c, d = counters
    low, high = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = ((second >> 32) & _MASK) ^ b ^ low, ((first >> 32) & _MASK) ^ d ^ high
        b, d = second & _MASK, first & _MASK
        low, high = (low + _KEY_STEPS[0]) & _MASK, (high + _KEY_STEPS[1]) & _MASK
    return a, b, c, d


def random_words(
    count: int,
    *,
    seed: int,
    step: int | Tensor = 0,
    stream: int = 0,
    start: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """`count` random 32-bit words, the i-th of which depends on (seed, step, stream, start + i) alone.

    Numerics:
        Uniform on 0 … 2**32 - 1. The same key gives the same words on every device and for every way of
        cutting the index range into pieces: a shard passes its offset as `start`.

    Args:
        count: How many words.
        seed: 64-bit key of the whole run.
        step: Training step, 0 to 2**32 - 1; a number, or an int64 tensor with one, on the device.
        stream: Which tensor, 0 to 2**32 - 1.
        start: Index of the first word.
        device: Where to make them.
    """
    first, last = start // 4, (start + count + 3) // 4
    index = torch.arange(first, last, dtype=torch.int64, device=device)
    constant = torch.zeros_like(index)
    counters = (index & _MASK, (index >> 32) & _MASK, constant + (step & _MASK), constant + (stream & _MASK))
    words = torch.stack(philox(counters, seed=seed), dim=1).flatten()
    return words[start - 4 * first :][:count]


def round_nearest(x: Tensor, to: Format | str) -> Tensor:
    """Round to the nearest number of a format, ties to even.

    Numerics:
        Exact: the result is the format's number nearest to x, for every float32 x, subnormals included.
        Above `Format.overflow_at` it is what `Format.overflow` says: inf, NaN or the largest number.
        inf is treated as a value above the range, NaN stays NaN, and -0.0 stays -0.0 where the format has one.
        Checked by tests/numerics/test_rounding.py over all 65,536 patterns of both 16-bit formats, all
        patterns of the smaller ones, every tie, and random float32.

    Args:
        x: float32, float16 or bfloat16 tensor; not modified.
        to: A Format or its name.

    Returns:
        A float32 tensor of x's shape; casting it to the format's own dtype loses nothing.
    """
    fmt = find_format(to)
    x = _as_float32(x)
    step = _spacing(x, fmt)
    return _limit(torch.round(x.abs() / step) * step, x, fmt)


def round_stochastic(
    x: Tensor, to: Format | str, *, seed: int, step: int = 0, stream: int = 0, start: int = 0
) -> Tensor:
    """Round up or down in proportion to the distance, so that the mean of many roundings is x.

    Numerics:
        Unbiased: E[result] == x exactly for every |x| <= `Format.max` that has no bits below 2**-32 of the
        spacing at x; otherwise |E[result] - x| < 2**-32 spacings. Between `max` and the number that would
        follow it the result is beyond the range with the matching probability.
        The choice depends on (seed, step, stream, index of the element) alone: it is the same after a resume,
        on another device, and on a shard that passes its offset as `start`.
        Representable values, inf (where the format has it), NaN and -0.0 come back unchanged.
        Checked by tests/numerics/test_rounding.py.

    Args:
        x: float32, float16 or bfloat16 tensor; not modified.
        to: A Format or its name.
        seed: 64-bit key of the run.
        step: Training step.
        stream: Which tensor of the run this is.
        start: Flat index of x's first element in the whole tensor.

    Returns:
        A float32 tensor of x's shape.
    """
    fmt = find_format(to)
    x = _as_float32(x)
    words = random_words(x.numel(), seed=seed, step=step, stream=stream, start=start, device=x.device)
    spacing = _spacing(x, fmt)
    quotient = x.abs() / spacing
    below = quotient.floor()
    # The fraction has at most 24 bits, so its product with 2**32 is exact; a comparison in float32 would
    # round the random word.
    threshold = ((quotient - below) * 2.0**32).nan_to_num(0.0, 0.0).to(torch.int64)
    up = words.view(x.shape) < threshold
    return _limit(torch.where(up, below + 1, below) * spacing, x, fmt)


def _as_float32(x: Tensor) -> Tensor:
    if x.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return x.detach().to(torch.float32)
    raise TensorError(f"Cannot round a {x.dtype} tensor. Convert it to torch.float32 first.")


def _spacing(x: Tensor, fmt: Format) -> Tensor:
    """Distance between the format's numbers at x, as if its exponent had no upper end."""
    field = (x.view(torch.int32) >> 23) & 0xFF
    exponent = (field - 127).clamp_(min=max(fmt.min_exponent, -126)) - fmt.mantissa_bits
    # A power of two from its bits: below 2**-126 float32 itself is subnormal.
    normal = (exponent + 127) << 23
    subnormal = torch.ones_like(exponent) << (exponent + 149).clamp_(min=0, max=30)
    return torch.where(exponent >= -126, normal, subnormal).view(torch.float32)


def _limit(magnitude: Tensor, x: Tensor, fmt: Format) -> Tensor:
    """Give the rounded magnitude x's sign, and what the format makes of a value beyond its range."""
    beyond = {"inf": torch.inf, "nan": torch.nan, "max": fmt.max}[fmt.overflow]
    over = (magnitude > fmt.max) | x.isinf()
    magnitude = torch.where(over, torch.full_like(magnitude, beyond), magnitude)
    magnitude = torch.where(x.isnan(), x, magnitude)
    signed = torch.copysign(magnitude, x)
    return signed + 0.0 if fmt.specials == "fnuz" else signed
