"""Text files that are on the disk whole or not at all, also when the machine stops half way; and read within bounds."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

MOST_BYTES = 64 << 20  # what floatline writes itself is a thousandth of it


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
        sync_folder(path.parent)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_bounded(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file that may be anyone's.

    Args:
        path: The file.
        most: How many bytes it may have.

    Raises:
        OSError: It cannot be read, is no plain file (a pipe would be waited for without end), or is larger.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        data = file.read(min(facts.st_size, most) + 1)  # room is made for all that is asked for
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return data


def sync_folder(folder: Path) -> None:
    """Bring the new name to the disk, where the system can."""
    if os.name == "nt":  # pragma: no cover - folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def find_root(start: Path | None = None) -> Path:
    """The repository that a folder lies in, else the folder itself: where what belongs to the whole of it is kept."""
    folder = (start or Path.cwd()).resolve()
    return next((place for place in (folder, *folder.parents) if (place / ".git").exists()), folder)
