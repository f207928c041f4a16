"""Tracebacks of a script that runs under a plan, as they are without one: floatline's frames are left out."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

_OWN = str(Path(__file__).parents[1]) + "/"
# Stand-ins for a user's code, and the example scripts of the package.
_USERS = str(Path(__file__).parents[1] / "systems") + "/"


def hide_own_frames(error: BaseException) -> None:
    """Leave floatline's frames out of an error's traceback, and out of those that it came from.

    Where nothing else is left, all stay: then it is floatline's own error. An error of reading the script has no frame.

    Args:
        error: Changed in place.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_own(one)
        left += [one.__cause__, one.__context__]


def _without_own(error: BaseException) -> TracebackType | None:
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept = [frame for frame in frames if not _is_own(frame)]
    if not kept:
        return None if isinstance(error, (SyntaxError, ImportError)) else error.__traceback__
    for frame, following in zip(kept, [*kept[1:], None], strict=True):
        frame.tb_next = following
    return kept[0]


def _is_own(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    if file.startswith(_USERS):
        return False
    return file.startswith(_OWN) or file in ("runpy", "<frozen runpy>") or file.endswith("/runpy.py")
