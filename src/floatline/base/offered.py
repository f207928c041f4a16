"""Names that a room offers, loaded from their files on first use, so that importing the room needs no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def offer(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a room's module.

    Args:
        room: Dotted name of the room.
        homes: The file of each name, as a dotted path below the room.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(f"{room}.{homes[name]}")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(f"{room}.{name} needs torch. Install it with: pip install 'floatline[torch]'.") from None
        value = home if homes[name] == name else getattr(home, name)
        setattr(sys.modules[room], name, value)
        return value

    return load
