"""Interrupt: Ctrl-C as a wish that a run asks about, instead of an exception in the middle of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """Takes Ctrl-C down as a wish while a run works; a second one raises KeyboardInterrupt as usual.

    Attributes:
        asked: Whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        # Python lets only the main thread have handlers; and whoever started a run that ignores Ctrl-C meant it.
        main = threading.current_thread() is threading.main_thread()
        self._mine = main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.default_int_handler(number, frame)
        self.asked = True

    def __enter__(self) -> None:
        if self._mine:
            self._before = signal.signal(signal.SIGINT, self._ask)

    def __exit__(self, *_: object) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, self._before)
