"""Patched sources: files that Python reads in a changed form, while those on the disk stay as they are."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

_SOURCES: dict[str, bytes] = {}


def read_source(path: str | Path) -> bytes:
    """What a file holds, or what it is taken to hold."""
    found = _SOURCES.get(str(Path(path).resolve())) if _SOURCES else None
    return Path(path).read_bytes() if found is None else found


def patch_sources(sources: Mapping[str, str]) -> None:
    """Have this process import the given texts instead of what the files hold; for as long as it lives.

    Modules that were imported before are not changed. No compiled form of a patched file is read or kept.

    Args:
        sources: Text by path.
    """
    read, look = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def get_data(loader: SourceFileLoader, path: str) -> bytes:
        found = _SOURCES.get(str(Path(path).resolve()))
        return read(loader, path) if found is None else found

    def path_stats(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
        if str(Path(path).resolve()) in _SOURCES:
            raise OSError(
                f"{path} is patched"
            )  # as for a file whose age is not known: its .pyc is neither read nor made
        return look(loader, path)

    for path, text in sources.items():
        whole = Path(path).resolve()
        _SOURCES[str(whole)] = text.encode("utf-8")
        # With no time of change, the entry is never compared with the disk.
        linecache.cache[str(whole)] = (len(text), None, text.splitlines(keepends=True), str(whole))
    SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign]
