"""Recorded: the metrics of one run as a file has them, and the curve of one of them."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floatline.errors import ComparisonError

MOST_NAMES = 100_000
MOST_VALUES = 5_000_000
STEP_NAMES = ("step", "global_step", "_step", "iteration", "iter", "epoch")
"""Keys that say when a value was recorded, the best first."""


@dataclass
class Recorded:
    """What one file holds about one run.

    Args:
        path: The file.
        kind: What wrote it, such as 'tensorboard'.
        values: By name, (step, value) in the order of writing; the step is None where none was written.
        finals: By name, values that were written once as a result, such as a summary.
        settings: Hyperparameters that the file holds, by name.
        began: When the run started, in seconds since 1970; None where the file does not say.
    """

    path: Path
    kind: str
    values: dict[str, list[tuple[int | None, float]]] = field(
        default_factory=dict[str, "list[tuple[int | None, float]]"]
    )
    finals: dict[str, float] = field(default_factory=dict[str, float])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    began: float | None = None
    num_values: int = 0

    def add(self, name: str, step: int | None, value: float) -> None:
        """Take one value in; ComparisonError where the file has more than any training has."""
        row = self.values.get(name)
        if row is None:
            if len(self.values) >= MOST_NAMES:
                raise ComparisonError(f"'{self.path}' has more than {MOST_NAMES:,} metrics. Name another file.")
            row = self.values[name] = []
        self.num_values += 1
        if self.num_values > MOST_VALUES:
            raise ComparisonError(f"'{self.path}' has more than {MOST_VALUES:,} values. Name another file.")
        row.append((step, value))

    @property
    def names(self) -> list[str]:
        """Names of everything that was recorded."""
        return list(dict.fromkeys((*self.values, *self.finals)))

    def spelling(self, name: str) -> str | None:
        """The name as the file spells it: itself, or with dots for slashes or the other way round; else None."""
        names = self.names
        if name in names:
            return name
        wanted = _plain(name)
        return next((known for known in names if _plain(known) == wanted), None)

    def curve(self, name: str) -> tuple[tuple[int, float], ...]:
        """(step, value) in rising order of step; of two values at one step the later one; empty without steps."""
        points = self.values.get(name, [])
        return tuple(sorted({step: value for step, value in points if step is not None}.items()))

    def last(self, name: str) -> float:
        """The value at the highest step; without steps the last one that was written."""
        points = self.values.get(name)
        if not points:
            return self.finals[name]
        if all(step is not None for step, _ in points):
            return self.curve(name)[-1][1]
        return points[-1][1]


def is_flat(curve: tuple[tuple[int, float], ...]) -> bool:
    """Two points or more, and all the same to the last bit."""
    return len(curve) > 1 and all(a[1] == b[1] for a, b in itertools.pairwise(curve))


def as_number(value: Any) -> float | None:
    """A float, where the value is a number or one of the words for NaN and infinity; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, str) and value.strip().lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(value)
    return None


def as_step(value: Any) -> int | None:
    """A whole number, where the value is one; else None."""
    number = as_number(value)
    if number is None or not math.isfinite(number) or number != int(number):
        return None
    return int(number)


def parse_json(text: str) -> Any:
    """What a JSON text says; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _plain(name: str) -> str:
    return re.sub(r"[./]", "/", name)
