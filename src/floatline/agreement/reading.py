"""Reading: one output or gradient of two computations, measured; the verdict on it is derived."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["agree", "farther", "other-function", "wrong"]
WRONG = 8.0
"""A side is wrong where it is so many times farther from FP32 than the roundings of its formats explain."""
FARTHER = 2.0
"""A side is farther where it is so many times the other's distance, each in roundings of its formats."""
# Up to here rounding explains everything, whatever the other side is. A cast more on the way is 1.4, two are 1.7, and
# a few runs with moved roundings know what is expected to a tenth.
_EXPLAINED = 2.0
_ORDER: tuple[Verdict, ...] = ("agree", "farther", "other-function", "wrong")


@dataclass(frozen=True)
class Reading:
    """One output or gradient. Distances are norms of differences over the norm of FP32's.

    Args:
        name: 'output', "output['logits']", or the name of a weight or input whose gradient it is.
        phase: Whether it is an output, or a gradient.
        apart: Distance of A and B.
        a: Distance of A to FP32.
        b: Distance of B to FP32.
        floor: Distance of FP32 to FP32 with its roundings moved by a unit.
        functions: Distance of A and B, both in FP32; None where B cannot be computed in FP32.
        excess_a: How many times farther A is than the roundings of its formats explain.
        excess_b: The same of B; from its own FP32 where it has one.
        excess_apart: How many times farther A and B are apart than the roundings of the coarser one explain.
        row_a: The row where A is the farthest off: the indices but the last.
        row_b: The same of B.
        exact: 'FP64' or 'FP32': what stands for exact.
    """

    name: str
    phase: Literal["forward", "backward"]
    apart: float
    a: float
    b: float
    floor: float
    functions: float | None
    excess_a: float
    excess_b: float
    excess_apart: float
    row_a: tuple[int, ...] = ()
    row_b: tuple[int, ...] = ()
    exact: str = "FP64"

    @property
    def other_function(self) -> bool:
        """Whether A and B mean different things: in FP32, too, they are farther apart than FP32 from itself."""
        limit = self.floor if self.exact == "FP64" else 3 * self.floor
        return self.functions is not None and self.functions > limit

    @property
    def verdict(self) -> Verdict:
        """What it says of the two."""
        if self._wrong_sides():
            return "wrong"
        if self.other_function:
            return "other-function"
        return "farther" if self._farther_side() else "agree"

    def _farther_side(self) -> Literal["A", "B", ""]:
        """The side that is farther in roundings of its formats, and in numbers, too.

        None where no digit of either is right, as of the gradient of a bias before a norm: what is exact is 0 there.
        """
        if min(self.a, self.b) >= 1.0:
            return ""
        if self.b > max(self.a, self.floor) and self.excess_b > max(_EXPLAINED, FARTHER * self.excess_a):
            return "B"
        far = self.a > max(self.b, self.floor) and self.excess_a > max(_EXPLAINED, FARTHER * self.excess_b)
        return "A" if far else ""

    def _wrong_sides(self) -> list[str]:
        """Sides that rounding does not explain; none where both are off by the same numbers: they do agree.

        What is no farther from FP32 than FP32 is from itself is not off, whatever it is made of.
        """
        sides = (("A", self.a, self.excess_a), ("B", self.b, self.excess_b))
        off = [name for name, far, excess in sides if not excess <= WRONG and not far <= self.floor]
        return [] if len(off) == 2 and self.excess_apart <= WRONG else off

    @property
    def shared(self) -> bool:
        """Whether both sides are off by more than rounding explains, and by the same numbers."""
        return min(self.excess_a, self.excess_b) > WRONG >= self.excess_apart

    @property
    def side(self) -> Literal["A", "B", "both", ""]:
        """Whose fault it is; A is what is meant where both mean different things."""
        if self.verdict == "wrong":
            off = self._wrong_sides()
            return "both" if len(off) == 2 else "A" if off[0] == "A" else "B"
        if self.verdict == "other-function":
            return "B"
        return self._farther_side() if self.verdict == "farther" else ""

    @property
    def blames_b(self) -> bool:
        """Whether B is off and A is not, or not nearly as far: where both are off, the nearer one is not to blame."""
        return self.side == "B" or (self.side == "both" and self.b > FARTHER * self.a)

    @property
    def weight(self) -> tuple[int, bool, float]:
        """The heaviest of several readings is the one to tell; of like ones an output, since gradients follow it."""
        size = self.functions or 0.0 if self.verdict == "other-function" else max(self.excess_a, self.excess_b)
        return _ORDER.index(self.verdict), self.phase == "forward", math.inf if math.isnan(size) else size

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "phase": self.phase,
            "verdict": self.verdict,
            "side": self.side,
            "apart": self.apart,
            "a_to_fp32": self.a,
            "b_to_fp32": self.b,
            "floor": self.floor,
            "functions_apart": self.functions,
            "roundings_a": self.excess_a,
            "roundings_b": self.excess_b,
            "roundings_apart": self.excess_apart,
            "row_a": list(self.row_a),
            "row_b": list(self.row_b),
            "exact": self.exact,
        }
