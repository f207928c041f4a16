"""Disks without room: a small one that is full, or a limit on the size of files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Generator
from pathlib import Path
from typing import Any

SMALL = 4 << 20  # bytes of a disk that was made for this


@contextlib.contextmanager
def no_room(folder: Path, details: dict[str, Any]) -> Generator[None]:
    """A file system that is full but for a part of what a checkpoint takes; or a limit on the size of files."""
    stat = os.statvfs(folder)
    if stat.f_blocks * stat.f_frsize > SMALL:
        with _limit(int(details["room"] * 4000)):
            yield
        return
    free = stat.f_bavail * stat.f_frsize
    room = int(details["room"] * 3) * 4096 if details["target"] == "checkpoint" else 0
    ballast = folder / "ballast"
    ballast.write_bytes(b"\0" * max(0, free - room))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def _limit(size: int) -> Generator[None]:
    """No file may grow beyond this size: writes fail with EFBIG, as Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def mount_small_disk(place: Path) -> bool:
    """A tmpfs of 1 MiB that only this process sees; False where the system does not let it have one."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, mounts = 0x10000000, 0x00020000
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(user | mounts):
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError:
        return False
    place.mkdir(parents=True, exist_ok=True)
    return not libc.mount(b"none", os.fsencode(place), b"tmpfs", 0, b"size=1m")
