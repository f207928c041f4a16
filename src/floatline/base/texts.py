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


def on_one_line(text: str) -> str:
    """The first line of code, with ' …' where there are more; `with x:` and one statement are one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if not line.startswith("#")), "".join(lines[:1]))
    if len(lines) == 2 and lines[0].endswith(":"):
        return " ".join(lines)
    return f"{first} …" if len(lines) > 1 else first


def percent(share: float, digits: int = 0) -> str:
    """A share as percent, its sign apart: 71 %."""
    return f"{100 * share:.{digits}f} %"
