"""FormatScale: the axis of drawings that hold numbers against the limits of a format, as percent of their width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOP = 40  # where the first row begins, below the names of the limits
_APART = 18  # percent that two words need on a phone
_ROOM = 0.075  # beyond the limits, as a share of what is between them
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_two(exponent: float) -> str:
    """A power of two as books print it: 2⁻²⁴."""
    return "2" + f"{exponent:g}".translate(_RAISED)


@dataclass(frozen=True)
class FormatScale:
    """Exponents of two, from left to right.

    Args:
        limits: Floor, smallest normal number and ceiling of a format, as exponents of two.
    """

    limits: Sequence[float]

    @property
    def ends(self) -> tuple[float, float]:
        """The first exponent and the last."""
        floor, _, ceiling = self.limits
        room = _ROOM * (ceiling - floor)
        return floor - room, ceiling + room

    def at(self, exponent: float) -> float:
        """Where an exponent stands, in percent; what is beyond the ends stands there."""
        first, last = self.ends
        return 100 * (min(max(exponent, first), last) - first) / (last - first)

    def head(self) -> list[str]:
        """The limits by name and number, as SVG."""
        body: list[str] = []
        floor, normal, _ = self.limits
        for exponent, word in zip(self.limits, ("floor", "subnormal", "ceiling"), strict=True):
            if exponent == normal and self.at(normal) - self.at(floor) < _APART:
                continue  # its words would stand on those of the floor
            x = f"{self.at(exponent):.2f}%"
            body.append(f'<text class="muted" x="{x}" y="13" text-anchor="middle">{word}</text>')
            body.append(f'<text x="{x}" y="29" text-anchor="middle">{power_of_two(exponent)}</text>')
        return body

    def zones(self, y: float, height: float) -> list[str]:
        """What is lost, what is coarse and what fits, as a strip in SVG."""
        first, last = self.ends
        edges = (first, *self.limits, last)
        return [
            f'<rect class="zone {kind}" x="{self.at(low):.2f}%" y="{y}" width="{self.at(high) - self.at(low):.2f}%" '
            f'height="{height}"/>'
            for low, high, kind in zip(edges, edges[1:], ("bad", "warn", "good", "bad"), strict=False)
        ]
