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
        self._made: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it was, what it is

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute by a value."""
        self._made.append((owner, name, _read(owner, name), value))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a function by what `make` makes of it; nothing happens where this torch has none of that name."""
        original = getattr(owner, name, None)
        if original is None:
            return
        replacement = make(original)
        functools.update_wrapper(replacement, original)
        self.set(owner, name, replacement)

    def lift(self) -> None:
        """Put everything back for a while; what somebody else has replaced since stays as it is."""
        for owner, name, old, value in reversed(self._made):
            if _read(owner, name) is value:
                _write(owner, name, old)

    def put_on(self) -> None:
        """Replace again what was lifted."""
        for owner, name, old, value in self._made:
            if _read(owner, name) is old:
                setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back for good."""
        while self._made:
            owner, name, old, _ = self._made.pop()
            _write(owner, name, old)


def _read(owner: Any, name: str) -> Any:
    return cast("dict[str, Any]", vars(owner)).get(name, _ABSENT)


def _write(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
