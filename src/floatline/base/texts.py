"""Bytes for people."""

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
