"""FolderLock: one writing process per run folder."""

from __future__ import annotations

import os
import socket
import stat
import sys
import weakref
from pathlib import Path

from floatline.errors import LedgerError


class FolderLock:
    """Holds a folder for this object until `release` or the end of the process.

    The lock is the operating system's (`flock`, on Windows `msvcrt.locking`), so it ends with the process however
    that dies; the file that stays behind is only a name tag and is taken over.

    Raises:
        LedgerError: Another process, or another object of this one, holds the folder.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "ledger.lock"
        try:
            # Not through a link: what it leads to would be written over.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as error:
            if not path.is_symlink() and not path.is_dir():
                raise
            raise LedgerError(f"{path} cannot be locked: {error.strerror}. Delete it; it is no lock file.") from None
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise LedgerError(f"{path} is no plain file. Delete it; it is no lock file.")
        try:
            lock_file(self._file)
        except BlockingIOError:
            holder = os.read(self._file, 200).decode(errors="replace").split("\n")[0]
            os.close(self._file)
            raise LedgerError(
                f"Run folder {folder} is in use by {holder or 'another process'}. "
                f"Stop that run, or choose another folder."
            ) from None
        except OSError as error:
            os.close(self._file)
            raise LedgerError(
                f"Run folder {folder} cannot be locked: {error.strerror}. Use a file system that has locks."
            ) from None
        os.ftruncate(self._file, 0)
        os.write(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._release_in_children()

    def release(self) -> None:
        """Give the folder back."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1

    def _release_in_children(self) -> None:
        """Keep forked children, such as data loader workers, from holding the lock of a parent that died."""
        if sys.platform == "win32":
            return
        lock = weakref.ref(self)

        def close_copy() -> None:
            held = lock()
            if held is not None:
                held.release()  # closes the child's copy; the parent's lock stays

        os.register_at_fork(after_in_child=close_copy)


def lock_file(file: int) -> None:
    """Lock the file for this process, or raise BlockingIOError."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, 1 << 30, os.SEEK_SET)  # beyond the name tag, which others must be able to read
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError:
            raise BlockingIOError from None
        finally:
            os.lseek(file, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
