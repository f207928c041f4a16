"""Parity: what two computations are to each other, as frozen data; the verdict is derived."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from floatline.agreement.place import EntryPlace
from floatline.agreement.reading import FARTHER, Reading, Verdict


@dataclass(frozen=True)
class LayerReading:
    """One layer, as it came in whole runs: what entered before is in it.

    Args:
        name: Of the module; a second call is 'name (2)'.
        phase: Its output, or the gradient of that.
        apart: Distance of A and B.
        a: Distance of A to FP32.
        b: Distance of B to FP32.
        noise_a: How far roundings move A's; in like formats, by the side whose do less.
        noise_b: The same of B.
    """

    name: str
    phase: Literal["forward", "backward"]
    apart: float
    a: float
    b: float
    noise_a: float
    noise_b: float

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "phase": self.phase,
            "apart": self.apart,
            "a_to_fp32": self.a,
            "b_to_fp32": self.b,
            "rounding_a": self.noise_a,
            "rounding_b": self.noise_b,
        }


@dataclass(frozen=True)
class Parity:
    """Two computations that must agree.

    Args:
        a: Name of the first.
        b: Name of the second.
        readings: One for each output and gradient.
        layers: One for each layer, in the order of the run; empty for functions and compiled modules.
        entry: Where they part; None where they agree.
        notes: What a reader must know.
        seconds: How long it took.
        asks_of_b: Whether B alone is judged, as compiled code is beside eager: that A is the farther one is said, and
            is no fault.
    """

    a: str
    b: str
    readings: tuple[Reading, ...]
    layers: tuple[LayerReading, ...] = ()
    entry: EntryPlace | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    asks_of_b: bool = False

    @property
    def worst(self) -> Reading:
        """The reading that decides: of the outputs and gradients, or of the part where it enters, if that is worse."""
        entered = () if self.entry is None else (self.entry.reading,)
        return max((*self.readings, *entered), key=lambda reading: (not self._is_nearer(reading), reading.weight))

    @property
    def verdict(self) -> Verdict:
        """'agree', 'farther', 'other-function' or 'wrong'."""
        worst = self.worst
        return "agree" if self._is_nearer(worst) else worst.verdict

    def _is_nearer(self, reading: Reading) -> bool:
        """Whether B is the nearer one, where it alone is judged."""
        return self.asks_of_b and reading.verdict == "farther" and reading.side == "A"

    @property
    def side(self) -> str:
        """Whose fault it is: 'A', 'B', 'both', or '' where they agree."""
        return "" if self.verdict == "agree" else self.worst.side

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        text = say(self.worst, self.a, self.b)
        hidden = self.entry is not None and all(reading.verdict == "agree" for reading in self.readings)
        return f"in {self.entry.module}, {text}; the outputs are within rounding" if self.entry and hidden else text

    def __str__(self) -> str:
        worst = self.worst
        entry = self.entry
        inside = f"{entry.module}: " if entry is not None and entry.module and worst is entry.reading else ""
        name = f"{inside}{worst.name}{'' if worst.phase == 'forward' else ', gradient'}"
        lines = [
            self.summary,
            f"  {name}: A to B {worst.apart:.2g}, "
            f"A to {worst.exact} {worst.a:.2g}, B to {worst.exact} {worst.b:.2g}, FP32's own {worst.floor:.2g}",
        ]
        lines += [] if self.entry is None else [f"  enters at {self.entry}"]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Plain data, for `--format json`."""
        return {
            "a": self.a,
            "b": self.b,
            "verdict": self.verdict,
            "side": self.side,
            "summary": self.summary,
            "readings": [reading.as_json() for reading in self.readings],
            "entry": None if self.entry is None else self.entry.as_json(),
            "layers": [layer.as_json() for layer in self.layers],
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def say(worst: Reading, a: str, b: str) -> str:
    """A verdict as one sentence, with the numbers that decide it."""
    if worst.verdict == "agree":
        return _say_agree(worst, a, b)
    if worst.verdict == "other-function":
        rounding = _ratio(worst.functions or 0.0, max(worst.a, worst.floor))
        size = f"{rounding} what {a}'s rounding does" if rounding != "0 times" else "far below what rounding does"
        return (
            f"{b} computes another function than {a}: in {worst.exact}, too, they are {worst.functions:.2g} apart, "
            f"{_ratio(worst.functions or 0.0, worst.floor)} FP32's own; that is {size}"
        )
    if worst.verdict == "wrong":
        return _say_wrong(worst, a, b)
    by_b = worst.side == "B"
    far, near = (b, a) if by_b else (a, b)
    farther, nearer = (worst.b, worst.a) if by_b else (worst.a, worst.b)
    if farther < FARTHER * nearer:  # few of many numbers are off
        row, excess = (worst.row_b, worst.excess_b) if by_b else (worst.row_a, worst.excess_a)
        place = f" at {', '.join(map(str, row))}" if row else ""
        return f"{far} is {_times(excess)} as far from FP32 as rounding explains{place}; {near} is not"
    return f"{far} is {_ratio(farther, nearer)} farther from FP32 than {near}; rounding alone explains {near}"


def _say_agree(worst: Reading, a: str, b: str) -> str:
    text = "both within rounding; nothing is wrong"
    near, far = sorted((worst.a, worst.b))
    if not near and not far:
        return f"{text}: both are exact"
    if far > 2 * near:
        first, second = (b, a) if worst.b > worst.a else (a, b)
        return f"{text}: {first} is {_ratio(far, near)} farther from FP32 than {second}, as its formats explain"
    return text


def _say_wrong(worst: Reading, a: str, b: str) -> str:
    off = {"A": [(a, worst.excess_a)], "B": [(b, worst.excess_b)]}
    sides = off.get(worst.side, [*off["A"], *off["B"]])
    said = [
        f"{name} is wrong: it is {_times(excess)} as far from FP32 as the rounding of its formats explains"
        if math.isfinite(excess)
        else f"{name} is wrong: it differs from FP32 where no rounding does"
        for name, excess in sides
    ]
    return "; ".join(said)


def _ratio(x: float, y: float) -> str:
    return _times(x / y) if y else _times(math.inf if x else 0.0)


def _times(ratio: float) -> str:
    if not math.isfinite(ratio):
        return "infinitely many times"
    return f"{ratio:,.0f} times" if ratio >= 100 else f"{ratio:.2g} times"
