"""Patches: functions and methods replaced for a while, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

_ABSENT = object()


class Patches:
    """Replaces attributes of modules and classes; `undo` puts every one back, the last first.

    An attribute that a class only inherits is deleted again, so that nothing is left behind.
    """

    def __init__(self) -> None:
        self._undone: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute by a value."""
        old = cast("dict[str, Any]", vars(owner)).get(name, _ABSENT)
        self._undone.append((owner, name, old))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a function by what `make` makes of it; nothing happens where this torch has none of that name."""
        original = getattr(owner, name, None)
        if original is None:
            return
        replacement = make(original)
        functools.update_wrapper(replacement, original)
        self.set(owner, name, replacement)

    def undo(self) -> None:
        """Put everything back."""
        while self._undone:
            owner, name, old = self._undone.pop()
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
