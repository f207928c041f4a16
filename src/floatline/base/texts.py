"""Texts for people: bytes, and lines that are safe for a terminal."""

from __future__ import annotations


def format_bytes(count: int | None) -> str:
    """Three digits and a unit of 1000: '1.24 GB'; '?' where unknown."""
    if count is None:
        return "?"
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def printable(text: str) -> str:
    """One line without anything that would move the cursor of a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def percent(share: float, digits: int = 0) -> str:
    """A share as percent, its sign apart: 71 %."""
    return f"{100 * share:.{digits}f} %"
