"""The counting behind `ranges`: one tally per tensor, by the fastest exact way for its dtype and device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from floatline.formats import Format
from floatline.numerics.tally import tally_cpu

FIRST_EXPONENT = -127
NUM_EXPONENTS = 255
_BLOCK = 1 << 20  # values per block where temporaries are made: they stay in the cache


@dataclass(frozen=True)
class Tally:
    """Device tensors that hold every figure of one pass.

    Args:
        counts: int64: zeros, infs, NaNs, one bin per exponent from FIRST_EXPONENT on, then overflow, to-zero and
            subnormal for each format.
        magnitudes: Largest finite magnitude (0 if none) and smallest above zero (inf if none).
        errors: Sum over the kept values of the relative error, for each format.
    """

    counts: Tensor
    magnitudes: Tensor
    errors: Tensor

    def merge(self, other: Tally) -> Tally:
        """Both tallies as one."""
        largest = torch.maximum(self.magnitudes[0], other.magnitudes[0])
        smallest = torch.minimum(self.magnitudes[1], other.magnitudes[1])
        return Tally(self.counts + other.counts, torch.stack([largest, smallest]), self.errors + other.errors)


def count(x: Tensor, formats: tuple[Format, ...]) -> Tally:
    """Tally a floating-point tensor against formats."""
    if x.numel() == 0:
        return _empty(x.device, formats)
    if x.is_cuda:
        from floatline.numerics.tally import tally_cuda

        if tally_cuda.takes(x):
            return Tally(*tally_cuda.count(x, formats))
    if x.element_size() <= 2:
        return _count_patterns(x, formats)
    return _count_values(x, formats)


# --- 16- and 8-bit tensors: count bit patterns, then look every pattern up once ----------------------------


def _count_patterns(x: Tensor, formats: tuple[Format, ...]) -> Tally:
    """Every figure of a narrow tensor follows from how often each magnitude occurs.

    With the magnitudes in order every class is a stretch of them: two running counts give its size, in a third of the
    time it takes to add every class up.
    """
    order, ends, stretches, errors = _pattern_facts(x.dtype, formats, x.device)
    occurrences = _pattern_counts(x)[order]
    below = torch.cat([occurrences.new_zeros(1), occurrences.cumsum(0)])
    counts = below[stretches[1]] - below[stretches[0]]
    zeros, finite = counts[0], below[-1] - counts[1] - counts[2]
    # The place where the running count reaches all finite values, and where it first exceeds the zeros.
    magnitudes = ends[torch.searchsorted(below, torch.stack([finite, zeros + 1]))]
    return Tally(counts, magnitudes, errors @ occurrences.to(errors.dtype))


def _pattern_counts(x: Tensor) -> Tensor:
    """How often each pattern occurs; 16-bit ones without their sign bit."""
    if x.device.type == "cpu":
        return tally_cpu.pattern_counts(x)
    carrier, mask = (torch.int16, 0x7FFF) if x.element_size() == 2 else (torch.uint8, 0xFF)
    patterns = x.contiguous().view(-1).view(carrier) & mask
    return _histogram(patterns.to(torch.int64), mask + 1)


@functools.lru_cache(maxsize=64)
def _pattern_facts(
    dtype: torch.dtype, formats: tuple[Format, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The patterns in order of magnitude, what follows from that order, and relative errors for each format.

    Returns:
        The order, NaN last; the magnitude at each running count (0 before the first, inf past the finite ones); first
        and end of each stretch, in the order of `Tally.counts`; the errors.
    """
    if dtype.itemsize == 2:
        patterns = torch.arange(0x8000, dtype=torch.int16, device="cpu")
    else:
        patterns = torch.arange(0x100, dtype=torch.int32, device="cpu").to(torch.uint8)
    values, order = patterns.view(dtype).to(torch.float64).abs().sort(stable=True)
    slots, classes, errors = _classify(values, formats)
    kinds = torch.cat([slots == torch.arange(3 + NUM_EXPONENTS, device=slots.device).unsqueeze(1), classes])
    first = kinds.to(torch.int8).argmax(dim=1)
    stretches = torch.stack([first, first + kinds.sum(dim=1)])
    finite = values.nan_to_num(nan=math.inf, posinf=math.inf)
    ends = torch.cat([values.new_zeros(1), finite, values.new_full((1,), math.inf)])
    wide = torch.float32 if device.type == "mps" else torch.float64
    return order.to(device), ends.to(device, wide), stretches.to(device), errors.to(device, wide)


def _classify(magnitudes: Tensor, formats: tuple[Format, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Slot of each float64 magnitude in the counts; per format its three classes and its relative error."""
    finite = magnitudes.isfinite() & (magnitudes > 0)
    exponent = torch.frexp(magnitudes.where(finite, 1.0)).exponent.to(torch.int64) - 1
    slots = 3 + (exponent - FIRST_EXPONENT).clamp_(0, NUM_EXPONENTS - 1)
    slots = slots.where(finite, torch.where(magnitudes == 0, 0, torch.where(magnitudes.isnan(), 2, 1)))
    classes: list[Tensor] = []
    errors: list[Tensor] = []
    for fmt in formats:
        zero, normal, over = fmt.cast_edges
        overflow = finite & (magnitudes >= over)
        classes += [overflow, finite & (magnitudes <= zero), finite & (magnitudes > zero) & (magnitudes < normal)]
        errors.append(_relative_error(magnitudes, fmt).where(finite & ~overflow, 0.0))
    empty = torch.zeros(0, magnitudes.numel(), dtype=torch.bool, device=magnitudes.device)
    if not formats:
        return slots, empty, empty.double()
    return slots, torch.stack(classes), torch.stack(errors)


def _relative_error(magnitudes: Tensor, fmt: Format) -> Tensor:
    exponent = torch.frexp(magnitudes).exponent - 1
    spacing = torch.ldexp(torch.ones_like(magnitudes), exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits)
    return (torch.round(magnitudes / spacing) * spacing - magnitudes).abs() / magnitudes


# --- wider tensors: look at the values, block by block --------------------------------------------------------


def _count_values(x: Tensor, formats: tuple[Format, ...]) -> Tally:
    """Blocks that fit the cache, in float64: every comparison and every relative error is exact there."""
    if x.device.type == "mps":
        x = x.cpu()  # no float64 there
    total = _empty(x.device, formats)
    for block in cast("tuple[Tensor, ...]", x.reshape(-1).split(_BLOCK)):
        magnitudes = block.abs().to(torch.float64)
        slots, classes, errors = _classify(magnitudes, formats)
        bins = _histogram(slots, 3 + NUM_EXPONENTS)
        finite = magnitudes.isfinite()
        nonzero = finite & (magnitudes > 0)
        extremes = [magnitudes.where(finite, 0.0).max(), magnitudes.where(nonzero, math.inf).min()]
        part = Tally(torch.cat([bins, classes.sum(dim=-1)]), torch.stack(extremes), errors.sum(dim=-1))
        total = total.merge(part)
    return total


def _histogram(indices: Tensor, size: int) -> Tensor:
    if indices.device.type == "cpu":
        return torch.bincount(indices, minlength=size)
    # bincount asks the device for the largest index and waits for the answer.
    zeros = torch.zeros(size, dtype=torch.int64, device=indices.device)
    return zeros.scatter_add_(0, indices, torch.ones_like(indices))


def _empty(device: torch.device, formats: tuple[Format, ...]) -> Tally:
    counts = torch.zeros(3 + NUM_EXPONENTS + 3 * len(formats), dtype=torch.int64, device=device)
    wide = torch.float32 if device.type == "mps" else torch.float64
    magnitudes = torch.zeros(2, dtype=wide, device=device)
    magnitudes[1:].fill_(math.inf)
    return Tally(counts, magnitudes, torch.zeros(len(formats), dtype=wide, device=device))
