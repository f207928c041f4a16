"""Undisturbed: Ctrl-C that waits until something is done as a whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Undisturbed:
    """A block that Ctrl-C does not tear apart: it is heard when the block is over.

    A second Ctrl-C does not wait: it is heard where it comes. Threads but the main one are never interrupted, and
    nothing is done for them. A handler of others is called as Python would call it.
    """

    __slots__ = ("_before", "_pressed")

    def __enter__(self) -> None:
        """Ctrl-C waits from here on."""
        self._pressed = False
        self._before = None
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):  # else the process does not hear it, or ends by it without Python
                self._before = before
                signal.signal(signal.SIGINT, self._wait)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        before = self._before
        if self._pressed and callable(before):
            before(number, frame)
        self._pressed = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """It is heard again, and so is one that waited."""
        before = self._before
        if before is None:
            return
        if signal.getsignal(signal.SIGINT) == self._wait:  # else the block has put another handler there
            signal.signal(signal.SIGINT, before)
        if self._pressed:
            before(signal.SIGINT, None)
