"""Text files that are on the disk whole or not at all, also when the machine stops half way."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name, bring it to the disk, and put it in its place.

    The file that was there keeps its permissions; a reader sees the old text or the new.

    Raises:
        OSError: It cannot be written; the old file is as it was.
    """
    path = path.resolve()  # a link stays one
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8", newline="") as file:
            if path.exists():
                draft.chmod(path.stat().st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _sync(path.parent)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    """Bring the new name to the disk, where the system can."""
    if os.name == "nt":  # pragma: no cover - folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
