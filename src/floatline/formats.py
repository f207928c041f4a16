"""Number formats, stated from their bits: range, spacing, subnormals. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from floatline.errors import FormatError, suggest

# What the highest exponent field holds besides numbers:
#   ieee   infinities and NaNs take the whole field
#   fn     only the all-ones pattern is NaN, there is no infinity
#   fnuz   the pattern of -0 is the only NaN, there is no infinity and no -0
#   none   every pattern is a number
Specials = Literal["ieee", "fn", "fnuz", "none"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: one sign bit, an exponent field, a mantissa field.

    Everything else is derived from the four facts below.

    Numerics:
        All properties are exact Python floats. `decode` and `round` agree with torch and ml_dtypes over
        every bit pattern of the 16-, 8-, 6- and 4-bit formats. Checked by tests/test_formats.py.

    Args:
        name: Short name, as used in plans and on the command line.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the stored mantissa, without the hidden bit.
        specials: What the format gives up for infinity and NaN.
        aliases: Other names people use for it.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Specials
    aliases: tuple[str, ...] = ()

    @property
    def bits(self) -> int:
        """Significant bits of one number (tf32 has 19, and is stored in 32)."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field."""
        return 2 ** (self.exponent_bits - 1) - (0 if self.specials == "fnuz" else 1)

    @property
    def has_inf(self) -> bool:
        """Whether overflow can be stored as infinity."""
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        """Whether NaN can be stored."""
        return self.specials != "none"

    @property
    def overflow(self) -> Literal["inf", "nan", "max"]:
        """What a cast makes of a value above `max`; "max" means that it saturates.

        This is the non-saturating cast of the specifications and of ml_dtypes. For fp8_e4m3fn torch
        gives NaN in some releases and saturates in others (2.13 does).
        """
        if self.has_inf:
            return "inf"
        return "nan" if self.has_nan else "max"

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def min_normal(self) -> float:
        """Smallest number with a full mantissa."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """Smallest number above zero, and the spacing of all numbers below `min_normal`."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @cached_property
    def max(self) -> float:
        """Largest finite number."""
        top_field = 2**self.exponent_bits - 1
        top_mantissa = 2**self.mantissa_bits - 1
        if self.specials == "ieee":
            top_field -= 1
        elif self.specials == "fn":
            top_mantissa -= 1
        return (1 + top_mantissa * 2.0**-self.mantissa_bits) * 2.0 ** (top_field - self.bias)

    @property
    def max_exact_integer(self) -> int:
        """Largest n such that 0, 1, …, n are all exact."""
        return min(2 ** (self.mantissa_bits + 1), int(self.max))

    @property
    def digits(self) -> int:
        """Decimal digits that survive a round trip through the format."""
        return int(self.mantissa_bits * math.log10(2))

    @property
    def epsilon(self) -> float:
        """Spacing of the numbers just above 1."""
        return 2.0**-self.mantissa_bits

    @property
    def zero_at(self) -> float:
        """Magnitudes up to and including this one round to zero (a tie goes to the even neighbour)."""
        return self.min_subnormal / 2

    @property
    def overflow_at(self) -> float:
        """Magnitude halfway between `max` and the number that would follow it."""
        return self.max + self.spacing(self.max) / 2

    @property
    def overflows_on_tie(self) -> bool:
        """Whether `overflow_at` itself overflows: so it is where `max` has an odd mantissa."""
        return bool(int(self.max / self.spacing(self.max)) % 2)

    @property
    def cast_edges(self) -> tuple[float, float, float]:
        """Where a cast changes kind: up to the first magnitude it gives zero, then, below the second, a
        subnormal number; from the third on it overflows (all for magnitudes that are float64 numbers).
        """
        over = self.overflow_at if self.overflows_on_tie else math.nextafter(self.overflow_at, math.inf)
        return self.zero_at, self.min_normal - self.zero_at, over

    def spacing(self, x: float) -> float:
        """Distance to the next number away from zero; inf beyond `max`, NaN at NaN."""
        if math.isnan(x):
            return math.nan
        x = abs(x)
        if x > self.max:
            return math.inf
        exponent = math.frexp(x)[1] - 1 if x else self.min_exponent
        return 2.0 ** (max(exponent, self.min_exponent) - self.mantissa_bits)

    def decode(self, pattern: int) -> float:
        """The number that a bit pattern stands for."""
        if not 0 <= pattern < 2**self.bits:
            raise FormatError(
                f"Pattern {pattern} does not fit {self.name}. Use 0 to {2**self.bits - 1} ({self.bits} bits)."
            )
        sign = -1.0 if pattern >> (self.bits - 1) else 1.0
        field = (pattern >> self.mantissa_bits) & (2**self.exponent_bits - 1)
        mantissa = pattern & (2**self.mantissa_bits - 1)
        top = field == 2**self.exponent_bits - 1
        if self.specials == "ieee" and top:
            return math.nan if mantissa else sign * math.inf
        if self.specials == "fn" and top and mantissa == 2**self.mantissa_bits - 1:
            return math.nan
        if self.specials == "fnuz" and pattern == 2 ** (self.bits - 1):
            return math.nan
        if field == 0:
            return sign * mantissa * self.min_subnormal
        return sign * math.ldexp(2**self.mantissa_bits + mantissa, field - self.bias - self.mantissa_bits)

    def round(self, x: float) -> float:
        """The format's number nearest to x, ties to even; beyond the range what `overflow` says."""
        magnitude = abs(x)
        if math.isnan(x) or x == 0:
            return x if self.specials != "fnuz" else x + 0.0
        over = magnitude > self.overflow_at or (magnitude == self.overflow_at and self.overflows_on_tie)
        if over or math.isinf(x):
            beyond = {"inf": math.inf, "nan": math.nan, "max": self.max}[self.overflow]
            return math.copysign(beyond, x)
        if magnitude >= self.max:
            return math.copysign(self.max, x)
        step = self.spacing(magnitude)
        rounded = math.copysign(round(magnitude / step) * step, x)
        return rounded + 0.0 if self.specials == "fnuz" else rounded

    def __str__(self) -> str:
        """For people: name, layout, range."""
        layout = f"1+{self.exponent_bits}+{self.mantissa_bits} bits"
        return f"{self.name} ({layout}, {self.min_subnormal:.3g} to {self.max:.6g})"


FP32 = Format("fp32", 8, 23, "ieee", ("float32", "float", "single"))
TF32 = Format("tf32", 8, 10, "ieee", ("tensorfloat32",))
BF16 = Format("bf16", 8, 7, "ieee", ("bfloat16", "bfloat"))
FP16 = Format("fp16", 5, 10, "ieee", ("float16", "half"))
E4M3FN = Format("fp8_e4m3fn", 4, 3, "fn", ("float8_e4m3fn", "e4m3fn", "e4m3"))
E5M2 = Format("fp8_e5m2", 5, 2, "ieee", ("float8_e5m2", "e5m2"))
E4M3FNUZ = Format("fp8_e4m3fnuz", 4, 3, "fnuz", ("float8_e4m3fnuz", "e4m3fnuz"))
E5M2FNUZ = Format("fp8_e5m2fnuz", 5, 2, "fnuz", ("float8_e5m2fnuz", "e5m2fnuz"))
# The element formats of the OCP microscaling (MX) specification that have fewer than 8 bits.
E3M2 = Format("fp6_e3m2", 3, 2, "none", ("float6_e3m2fn", "e3m2"))
E2M3 = Format("fp6_e2m3", 2, 3, "none", ("float6_e2m3fn", "e2m3"))
E2M1 = Format("fp4_e2m1", 2, 1, "none", ("float4_e2m1fn", "e2m1", "fp4"))

FORMATS: dict[str, Format] = {
    f.name: f for f in (FP32, TF32, BF16, FP16, E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E3M2, E2M3, E2M1)
}
_BY_ALIAS = {alias: f for f in FORMATS.values() for alias in (f.name, *f.aliases)}
_AMBIGUOUS = {
    "fp8": (E5M2, E4M3FN),
    "float8": (E5M2, E4M3FN),
    "fp6": (E3M2, E2M3),
    "float6": (E3M2, E2M3),
}


def find_format(name: object) -> Format:
    """The format of that name: 'fp16', 'torch.float16', a torch dtype, or a Format itself."""
    if isinstance(name, Format):
        return name
    key = str(name).removeprefix("torch.").strip().lower().replace("-", "_")
    if key in _BY_ALIAS:
        return _BY_ALIAS[key]
    if key in _AMBIGUOUS:
        choices = " or ".join(f"{f.name!r} (max {f.max:g})" for f in _AMBIGUOUS[key])
        raise FormatError(f"Format {key!r} is ambiguous. Use {choices}.")
    raise FormatError(f"Format {str(name)!r} is not known. {suggest(key, FORMATS)}")
