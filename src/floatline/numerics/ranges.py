"""What one tensor would lose in one or several formats, counted in one pass and read when asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from floatline.errors import TensorError
from floatline.formats import Format, find_format
from floatline.numerics.tally import tally
from floatline.numerics.tally.tally import FIRST_EXPONENT, NUM_EXPONENTS, Tally


@dataclass(frozen=True)
class Fit:
    """How a tensor's finite values fit one format, were they cast to it with nearest rounding.

    Args:
        format: The format.
        count: How many finite non-zero values there are.
        overflow: Values that would leave the range.
        to_zero: Non-zero values that would become zero.
        subnormal: Values that would become subnormal: kept, with fewer bits.
        relative_error: Mean of |cast(x) - x| / |x| over the values that neither overflow nor are zero.
    """

    format: Format
    count: int
    overflow: int
    to_zero: int
    subnormal: int
    relative_error: float

    def share(self, part: int) -> float:
        """A count as a share of the finite non-zero values."""
        return part / self.count if self.count else 0.0


class Ranges:
    """The figures of one tensor. Nothing is read from the device before the first property is."""

    def __init__(self, tally: Tally, *, count: int, source: str, formats: Sequence[Format]) -> None:
        self.count = count
        self.source = source
        self.formats = tuple(formats)
        self._tally = tally

    @cached_property
    def _counts(self) -> list[int]:
        return cast("list[int]", self._tally.counts.tolist())

    @cached_property
    def _magnitudes(self) -> list[float]:
        return cast("list[float]", self._tally.magnitudes.tolist())

    @cached_property
    def _errors(self) -> list[float]:
        return cast("list[float]", self._tally.errors.tolist())

    @property
    def zeros(self) -> int:
        """Values that are zero already."""
        return self._counts[0]

    @property
    def infs(self) -> int:
        """Values that are infinite already."""
        return self._counts[1]

    @property
    def nans(self) -> int:
        """Values that are NaN."""
        return self._counts[2]

    @property
    def num_nonzero(self) -> int:
        """Finite values other than zero."""
        return self.count - self.zeros - self.infs - self.nans

    @property
    def largest(self) -> float:
        """Largest finite magnitude; 0 where there is none."""
        return self._magnitudes[0]

    @property
    def smallest(self) -> float:
        """Smallest finite magnitude above zero; inf where there is none."""
        return self._magnitudes[1]

    @cached_property
    def exponents(self) -> dict[int, int]:
        """How many finite non-zero values have floor(log2 |x|) == e, for each e that occurs.

        The first and last bins, -127 and 127, also hold what lies beyond them.
        """
        bins = self._counts[3 : 3 + NUM_EXPONENTS]
        return {FIRST_EXPONENT + i: n for i, n in enumerate(bins) if n}

    def against(self, to: Format | str) -> Fit:
        """How the values fit a format; it must be one of those that were measured."""
        fmt = find_format(to)
        if fmt not in self.formats:
            measured = ", ".join(f.name for f in self.formats)
            raise TensorError(f"Format {fmt.name!r} was not measured. Measured: {measured or 'none'}.")
        i = self.formats.index(fmt)
        overflow, to_zero, subnormal = self._counts[3 + NUM_EXPONENTS + 3 * i :][:3]
        kept = self.num_nonzero - overflow
        error = self._errors[i] / kept if kept else 0.0
        return Fit(fmt, self.num_nonzero, overflow, to_zero, subnormal, error)

    def __add__(self, other: Ranges) -> Ranges:
        """The figures of both tensors together, still on their device."""
        if self.formats != other.formats:
            raise TensorError("Cannot add ranges measured against different formats. Measure both against the same.")
        source = self.source if self.source == other.source else "mixed"
        total = self._tally.merge(other._tally)
        return Ranges(total, count=self.count + other.count, source=source, formats=self.formats)

    def __str__(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.count:,} values of {self.source}: {self.zeros:,} zero, {self.infs:,} inf, {self.nans:,} NaN",
            f"  magnitudes {self.smallest:.3g} to {self.largest:.3g}"
            if self.num_nonzero
            else "  no finite value but 0",
        ]
        for fmt in self.formats:
            fit = self.against(fmt)
            lines.append(
                f"  in {fmt.name}: {fit.overflow:,} overflow, {fit.to_zero:,} become zero, "
                f"{fit.subnormal:,} subnormal, mean relative error {fit.relative_error:.2g}"
            )
        return "\n".join(lines)


def measure_ranges(x: Tensor, *formats: Format | str) -> Ranges:
    """Count what a tensor holds, and what each format would make of it.

    Numerics:
        Counts and magnitudes are exact for float16, bfloat16, float8, float32 and float64 tensors, and agree with
        casting every value. `relative_error` is a sum in float64 (float32 per block on CUDA, within 1e-5 of it).
        Checked by tests/numerics/test_ranges.py over every 16- and 8-bit pattern.

    One pass over the data on any device, no host sync: the figures are read when a property is.

    Args:
        x: A floating-point tensor, any shape and layout; a DTensor is measured by its local shard.
        *formats: Formats to hold it against; none means the tensor's own.

    Example:
        >>> grad = torch.tensor([1e-9, 3e-6, 0.5, 7e4])
        >>> measure_ranges(grad, "fp16").against("fp16").to_zero
        1
    """
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TensorError(f"Cannot measure a {type(x).__name__}. Pass a torch tensor.")
    if x.is_complex():
        raise TensorError(f"Cannot measure a {x.dtype} tensor. Measure torch.view_as_real(x) instead.")
    if not x.is_floating_point():
        raise TensorError(f"Cannot measure a {x.dtype} tensor. Measure floating-point tensors, or x.float().")
    if x.layout != torch.strided:
        raise TensorError(f"Cannot measure a {x.layout} tensor. Measure its values(), or x.to_dense().")
    local = getattr(x, "to_local", None)
    if local is not None:
        x = local()
    x = x.detach()
    name = str(x.dtype).removeprefix("torch.")
    wanted = tuple(dict.fromkeys(find_format(f) for f in formats or (_own_format(name),)))
    return Ranges(tally.count(x, wanted), count=x.numel(), source=name, formats=wanted)


def _own_format(name: str) -> Format:
    return find_format("fp32" if name == "float64" else name)
