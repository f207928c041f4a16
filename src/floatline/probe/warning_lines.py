"""Warnings that the user's code causes point at the user's line, though a wrapper of the watch lies between."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from floatline.probe.events import Watch
from floatline.probe.patches import Patches

_HERE = str(Path(__file__).parent)
# How torch warns of the recorder's own hooks, in a step that runs eagerly.
_OF_HOOKS = "Using `torch.compile(module)` when there are global hooks on modules"


def patch_warnings(seen: Watch, patches: Patches) -> None:
    """Let warnings count their stack levels without the frames of the watch, and not speak of its hooks."""
    patches.wrap(warnings, "warn", lambda warn: _count_levels(seen, warn))


def _count_levels(seen: Watch, warn: Callable[..., None]) -> Callable[..., None]:
    def watched(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **kwargs: Any) -> None:
        if seen.listener is not None and seen.listener.records and str(message).startswith(_OF_HOOKS):
            return
        # One level more, for this frame.
        warn(message, category, _find_level(sys._getframe(1), stacklevel) + 1, source, **kwargs)  # pyright: ignore[reportPrivateUsage]

    return watched


def _find_level(frame: FrameType | None, wanted: int) -> int:
    """The stack level at which the wanted one lies, where frames of the watch are not counted.

    Args:
        frame: Who warns.
        wanted: The level that it gave: 1 is itself, 2 its caller.
    """
    level, counted = 0, 0
    while frame is not None and counted < max(wanted, 1):
        level += 1
        counted += level == 1 or not frame.f_code.co_filename.startswith(_HERE)
        frame = frame.f_back
    return level if frame is not None else wanted
