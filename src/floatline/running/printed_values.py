"""PrintedValues: the numbers that a script prints or logs, by line and by the word before them."""

from __future__ import annotations

import builtins
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

from floatline.precision.user_frames import find_caller, is_users
from floatline.probe.watch.patches import Patches

# So many numbers of a place are kept, of so many places, and of texts that are no longer than the last.
_MOST_VALUES, _MOST_PLACES, _LONGEST = 200, 500, 2000
_NUMBER = re.compile(r"(?<![\w.])([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)\b)(\s?[A-Za-z%/]+)?", re.I)
_CLOCK = re.compile(r"\d+(?::\d+)+(?:[.,]\d+)?|\d{4}-\d\d-\d\d")
_WORD = re.compile(r"([A-Za-z_@][\w@./-]*)\W*$")
# Numbers about the machine, or the loss scale, not about what is learnt.
_MACHINE = re.compile(
    r"(?:^|[^a-z])(?:time|times|sec|secs|seconds?|mins?|minutes?|hours?|ms|us|elapsed|took|eta|duration|dt|speed|fps|"
    r"scale|scaler|skip|skips|skipped|overflows?|throughput|mem|memory|[kmg]i?b|pid|port|date|mfu|(?:it|tok|tokens|samples|images|examples|steps)/s(?:ec)?|s|h)(?:$|[^a-z])"
)


class PrintedValues:
    """Hears what a script prints, and what it logs.

    Times, speeds and sizes of memory are left out where the words around them say that they are such.

    Attributes:
        places: The numbers by 'FILE:LINE (WORD)', in their order.
        quanta: The last digit of each of them that is shown.
    """

    def __init__(self) -> None:
        self.places: dict[str, list[float]] = {}
        self.quanta: dict[str, float] = {}

    def patch(self, patches: Patches) -> None:
        """Listen."""
        patches.wrap(builtins, "print", self._printing)
        patches.wrap(logging.Logger, "handle", self._logging)

    def _printing(self, original: Callable[..., None]) -> Callable[..., None]:
        def print_(*values: Any, **options: Any) -> None:
            original(*values, **options)
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            if options.get("file") in (None, sys.stdout, sys.stderr) and is_users(frame.f_code.co_filename):
                self._hear(f"{frame.f_code.co_filename}:{frame.f_lineno}", " ".join(map(str, values)))

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
    text = _CLOCK.sub(lambda match: " " * len(match.group()), text)
    for match in _NUMBER.finditer(text):
        before = _WORD.search(text[: match.start()])
        word, unit = before.group(1) if before is not None else "", (match.group(2) or "").strip()
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
