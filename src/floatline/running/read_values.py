"""ReadValues: the numbers that a script reads out of tensors or prints, by line: what it logs and decides by."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from floatline.precision.user_frames import is_users
from floatline.probe.watch.patches import Patches
from floatline.running.printed_values import PrintedValues

# So many numbers of a line are kept, and of so many lines.
_MOST_VALUES, _MOST_LINES = 200, 500
_READERS = ("item", "tolist", "numpy", "__float__", "__int__", "__array__")


class ReadValues:
    """Hears what leaves tensors for Python: `item`, `float`, `tolist`, `numpy`; and what is printed.

    What torch reads for itself, such as whether gradients are finite, is none of the script's. Of several numbers, the
    mean is kept. Truth values are not, nor several integers, which are ids or samples.

    Attributes:
        lines: The numbers by 'FILE:LINE', in their order.
        printed: What is printed.
    """

    def __init__(self) -> None:
        self.lines: dict[str, list[float]] = {}
        self.printed = PrintedValues()
        self._inside = False

    def patch(self, patches: Patches) -> None:
        """Listen."""
        self.printed.patch(patches)
        for name in _READERS:
            patches.wrap(Tensor, name, self._reading)

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not _is_number(tensor):
                return original(tensor, *args, **kwargs)
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            key = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            kept = self.lines.get(key)
            if kept is None and is_users(frame.f_code.co_filename) and len(self.lines) < _MOST_LINES:
                kept = self.lines[key] = []
            self._inside = True
            try:
                value = original(tensor, *args, **kwargs)
            finally:
                self._inside = False
            if kept is not None and len(kept) < _MOST_VALUES:
                kept.append(_sum_up(value))
            return value

        return read

    def write(self, path: Path) -> None:
        """Write all lines as JSON, and the last digits of what is printed; what is not finite becomes null."""
        rows = {**self.lines, **self.printed.places}
        lines = {key: [x if math.isfinite(x) else None for x in values] for key, values in rows.items() if values}
        path.write_text(json.dumps({"lines": lines, "quanta": self.printed.quanta}), encoding="utf-8")


def _is_number(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype is torch.bool:
        return False
    return tensor.is_floating_point() or tensor.numel() == 1


def _sum_up(value: Any) -> float:
    """The number, or the mean of several; NaN where there is none."""
    try:
        if isinstance(value, (int, float)):
            return float(value)
        mean = getattr(value, "mean", None)
        return float(mean()) if mean is not None and value.size else _mean(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _mean(values: Any) -> float:
    found: list[float] = []
    stack = [values]
    while stack:
        last = stack.pop()
        if isinstance(last, list):
            stack += last
        else:
            found.append(float(last))
    return math.fsum(found) / len(found) if found else math.nan
