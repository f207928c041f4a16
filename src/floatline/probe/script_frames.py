"""The line of a script that a call of its loop comes from, also where a framework makes the call."""

from __future__ import annotations

import sys
from functools import cache
from types import FrameType, TracebackType

from floatline.probe.frames import Spot, find_caller, find_raiser, is_users


@cache
def is_installed(file: str) -> bool:
    """Whether a source file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file


def find_script_line() -> Spot:
    """The innermost frame that is neither Python's, torch's nor an installed package's; else as `find_caller`."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file) and not is_installed(file):
            return Spot(file, frame.f_lineno, _name(frame))
        frame = frame.f_back
    return find_caller()


def find_raising_line(trace: TracebackType | None) -> Spot:
    """The innermost frame of a traceback that is neither Python's, torch's nor a package's; else as `find_raiser`."""
    lines: list[Spot] = []
    step = trace
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if is_users(file) and not is_installed(file):
            lines.append(Spot(file, step.tb_lineno, _name(step.tb_frame)))
        step = step.tb_next
    return lines[-1] if lines else find_raiser(trace)


def _name(frame: FrameType) -> str:
    name = str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name)).rpartition("<locals>.")[2]
    return "" if name == "<module>" else name
