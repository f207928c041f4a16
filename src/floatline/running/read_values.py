"""ReadValues: the numbers that a script reads out of tensors or prints, by line: what it logs and decides by."""

from __future__ import annotations

import builtins
import json
import linecache
import logging
import math
import re
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from floatline.precision.user_frames import find_caller, is_users
from floatline.probe.watch.patches import Patches, is_inside_compiled

# So many numbers of a line are kept, and of so many lines.
_MOST_VALUES, _MOST_LINES = 200, 500
_SCALE, _LAST_SCALES = "get_scale", 8
_READERS = ("item", "tolist", "numpy", "__float__", "__int__", "__array__")
# Of so many places numbers are kept, and of texts that are no longer than the last.
_MOST_PLACES, _LONGEST = 500, 2000
_NUMBER = re.compile(
    r"(?<![\w.])([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)\b)(\s?[A-Za-z%/]+(?![\w=:]))?", re.I
)
_CLOCK = re.compile(r"\d+(?::\d+)+(?:[.,]\d+)?|\d{4}-\d\d-\d\d")
_POWER = ("^", "**")
_WORD = re.compile(r"([A-Za-z_@][\w@./-]*)\W*$")
# Numbers about the machine, or the loss scale, not about what is learnt.
_MACHINE = re.compile(
    r"(?:^|[^a-z])(?:time|times|runtime|walltime|wall|latency|timings?|clock|sec|secs|seconds?|mins?|minutes?|hours?|ms|"
    r"us|elapsed|took|eta|duration|dt|speed|fps|scale|scaler|skip|skips|skipped|overflows?|throughput|mem|memory|"
    r"[kmg]i?b|pid|port|date|mfu|(?:it|tok|tokens|samples|images|examples|steps)/s(?:ec)?|s|h)(?:$|[^a-z])"
)


class ReadValues:
    """Hears what leaves tensors for Python: `item`, `float`, `tolist`, `numpy`; and what is printed.

    What torch reads for itself, such as whether gradients are finite, is none of the script's. Of several numbers, the
    mean is kept. Truth values are not, nor several integers, which are ids or samples, nor what a line reads that asks
    for the loss scale, which is another one in FP32: what it prints is kept all the same. Nor is anything that compiled
    code reads.

    Attributes:
        lines: The numbers by 'FILE:LINE', in their order; '#2' follows for the second place of a line that reads.
        printed: What is printed.
    """

    def __init__(self) -> None:
        self.lines: dict[str, list[float]] = {}
        self.printed = PrintedValues()
        self._inside = False
        self._others: set[CodeType] = set()  # code that is not the script's
        self._places: dict[tuple[str, int], list[int]] = {}  # of each line: where in its code it reads

    def patch(self, patches: Patches) -> None:
        """Listen."""
        self.printed.patch(patches)
        for name in _READERS:
            patches.wrap(Tensor, name, self._reading)

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            # An optimizer reads the count of steps of each of its parameters.
            if frame.f_code in self._others or self._inside or not _is_number(tensor):
                return original(tensor, *args, **kwargs)
            # The same place of compiled code is another one in the same code where it runs eagerly.
            kept = None if is_inside_compiled() else self._find_row(frame)
            self._inside = True
            try:
                value = original(tensor, *args, **kwargs)
            finally:
                self._inside = False
            if kept is not None and len(kept) < _MOST_VALUES:
                kept.append(_sum_up(value))
            return value

        return read

    def _find_row(self, frame: FrameType) -> list[float] | None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not is_users(file):
            self._others.add(frame.f_code)
            return None
        places = self._places.setdefault((file, line), [])
        if frame.f_lasti not in places:
            places.append(frame.f_lasti)
        number = places.index(frame.f_lasti) + 1
        key = f"{file}:{line}" + (f"#{number}" if number > 1 else "")
        if key not in self.lines and len(self.lines) < _MOST_LINES:
            if _SCALE in linecache.getline(file, line):
                return None
            self.lines[key] = []
        return self.lines.get(key)

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


class PrintedValues:
    """Hears what a script prints, and what it logs.

    Times, speeds and sizes of memory are left out where the words around them say that they are such, and what a
    `GradScaler` gave as its scale, which is another one in FP32, also without a word.

    Attributes:
        places: The numbers by 'FILE:LINE (WORD)', in their order.
        quanta: The last digit of each of them that is shown.
    """

    def __init__(self) -> None:
        self.places: dict[str, list[float]] = {}
        self.quanta: dict[str, float] = {}
        self._scales: deque[float] = deque(maxlen=_LAST_SCALES)

    def patch(self, patches: Patches) -> None:
        """Listen."""
        patches.wrap(builtins, "print", self._printing)
        patches.wrap(logging.Logger, "handle", self._logging)
        patches.wrap(torch.amp.GradScaler, "get_scale", self._scaling)

    def _scaling(self, original: Callable[..., float]) -> Callable[..., float]:
        def get_scale(scaler: Any) -> float:
            scale = original(scaler)
            self._scales.append(scale)
            return scale

        return get_scale

    def _show(self, value: Any) -> str:
        """A value as it is printed; a loss scale, which is known by being that object, as one that has a word."""
        return "; scale 0" if any(value is scale for scale in self._scales) else str(value)

    def _printing(self, original: Callable[..., None]) -> Callable[..., None]:
        def print_(*values: Any, **options: Any) -> None:
            original(*values, **options)
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            if options.get("file") in (None, sys.stdout, sys.stderr) and is_users(frame.f_code.co_filename):
                self._hear(f"{frame.f_code.co_filename}:{frame.f_lineno}", " ".join(map(self._show, values)))

        return print_

    def _logging(self, original: Callable[..., None]) -> Callable[..., None]:
        def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            original(logger, record)
            spot = find_caller()
            if is_users(record.pathname) and spot.file == record.pathname:
                self._hear(f"{record.pathname}:{record.lineno}", record.getMessage())

        return handle

    def _hear(self, line: str, text: str) -> None:
        used: set[str] = set()
        for name, value, quantum in find_numbers(text[:_LONGEST]):
            place = f"{line} ({name})"
            if name in used or (place not in self.places and len(self.places) >= _MOST_PLACES):
                continue
            used.add(name)
            kept = self.places.setdefault(place, [])
            if len(kept) < _MOST_VALUES:
                kept.append(value)
                self.quanta[place] = max(self.quanta.get(place, 0.0), quantum)


def find_numbers(text: str) -> list[tuple[str, float, float]]:
    """The numbers of a text: the word before each, or which one it is; its value; and its last digit.

    A number under a word that was there before is another one: it is counted.
    """
    found: list[tuple[str, float, float]] = []
    count: dict[str, int] = {}
    word, end = "", 0
    text = _CLOCK.sub(lambda match: " " * len(match.group()), text)
    for match in _NUMBER.finditer(text):
        between, unit = text[end : match.start()], (match.group(2) or "").strip()
        if between not in _POWER:  # the exponent of 2^15 goes by the word of 2
            before = _WORD.search(between)
            word = before.group(1) if before is not None else ""
        end = match.end(1)
        if _MACHINE.search(word.lower().replace("_", " ")) or _MACHINE.search(unit.lower()):
            continue
        number = match.group(1)
        count[word] = count.get(word, 0) + 1
        name = f"{word or 'number'} {count[word]}" if count[word] > 1 or not word else word
        found.append((name, float(number), _last_digit(number)))
    return found


def _last_digit(number: str) -> float:
    """What one more in the last digit makes: 0.001 of '8.019', 1e-10 of '7.3e-09'."""
    mantissa, _, exponent = number.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if mantissa[-1:].isdigit() or mantissa.endswith(".") else 0.0
