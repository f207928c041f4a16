"""KeptWrites: what a script writes while it is tried goes to another folder, and its own files stay as they are."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
_OUTSIDE = ("/dev/", "/proc/", "/sys/")


class KeptWrites:
    """Sends writes to a folder, and reads of what was written there after them.

    Covered are `open`, `pathlib`, torch.save, safetensors, and removing or renaming by `os` and `shutil`. A write to a
    file that is there by any other way is refused, and so is a process that would not know of all this, such as one
    that is started by spawn. New files and folders, and caches in hidden folders, are let through.

    Attributes:
        refused: What the script could not be allowed, as one line each.

    Args:
        folder: Where writes go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._home = Path.cwd()
        self._moved: dict[str, str] = {}
        self._made: set[str] = set()  # files and folders that are where the script put them
        self._thread = threading.local()
        self._on = False
        self.refused: list[str] = []

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Keep writes apart in here."""
        sys.addaudithook(self._hear)
        changed = [*self._changes()]
        old = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
        for owner, name, make in changed:
            setattr(owner, name, make(getattr(owner, name)))
        self._on = True
        try:
            yield
        finally:
            self._on = False
            for owner, name, function in old:
                setattr(owner, name, function)

    def _changes(self) -> Generator[tuple[Any, str, Callable[[Any], Any]]]:
        yield builtins, "open", self._opening
        yield io, "open", self._opening
        yield torch, "save", lambda function: self._at(function, 1, self._to_write)
        yield torch, "load", lambda function: self._at(function, 0, self._to_read)
        for name in ("rename", "replace"):
            yield os, name, self._renaming
        for name in ("remove", "unlink"):
            yield os, name, self._removing
        yield shutil, "rmtree", self._removing
        with contextlib.suppress(ImportError):  # a system that does not have them
            from multiprocessing import popen_forkserver, popen_spawn_posix

            yield popen_spawn_posix.Popen, "_launch", self._starting
            yield popen_forkserver.Popen, "_launch", self._starting
        try:
            import safetensors.torch as safe
        except ImportError:
            return
        yield safe, "serialize_file", lambda function: self._at(function, 1, self._to_write)
        yield safe, "safe_open", lambda function: self._at(function, 0, self._to_read)

    def _at(self, function: Any, place: int, find: Callable[[Any], Any]) -> Any:
        """A function whose argument at a place is a file."""
        names = ("f", "filename")

        def call(*args: Any, **named: Any) -> Any:
            if len(args) > place:
                args = (*args[:place], find(args[place]), *args[place + 1 :])
            return function(*args, **{name: find(v) if name in names else v for name, v in named.items()})

        return call

    def _opening(self, function: Any) -> Any:
        def open_apart(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            if self._on and not set(mode).isdisjoint("wax+"):
                keeps = set(mode).isdisjoint("wx")
                return function(self._to_write(file, copy=keeps), mode, *args, **named)
            return function(self._to_read(file), mode, *args, **named)

        return open_apart

    def _renaming(self, function: Any) -> Any:
        def rename_apart(src: Any, dst: Any, **named: Any) -> Any:
            source, target = _whole(src), _whole(dst)
            if not self._on or not (source in self._moved or os.path.lexists(source)):
                return function(src, dst, **named)
            known = source in self._moved or self._is_free(source)
            if not known or any(fd is not None for fd in named.values()):
                self._refuse(f"{src} would be renamed")
            if source not in self._moved and Path(source).is_dir():
                return self._rename_folder(function, source, target)
            _move(function, self._moved.get(source, source), self._to_write(target))
            self._forget(source)
            return None

        return rename_apart

    def _rename_folder(self, function: Any, source: str, target: str) -> None:
        """Rename a folder that the script made, and what was sent elsewhere from there."""
        if not self._is_free(target):
            self._refuse(f"{target} would be replaced")
        function(source, target)
        moved = {path: place for path, place in self._moved.items() if _is_in(path, source)}
        made = [path for path in self._made if _is_in(path, source)]
        self._forget(source)
        self._moved |= {target + path.removeprefix(source): place for path, place in moved.items()}
        self._made |= {target, *(target + path.removeprefix(source) for path in made)}

    def _removing(self, function: Any) -> Any:
        def remove_apart(path: Any, *args: Any, **named: Any) -> Any:
            # shutil.rmtree removes by names within the folder, which was asked for as a whole.
            if not self._on or isinstance(path, int) or getattr(self._thread, "removes", False):
                return function(path, *args, **named)
            whole = _whole_within(path, named.get("dir_fd"))
            if whole not in self._moved and not self._is_free(whole):
                self._refuse(f"{path} would be removed")
            place = self._moved.get(whole, path)
            self._forget(whole)
            self._thread.removes = True
            try:
                return function(place, *args, **named)
            finally:
                self._thread.removes = False

        return remove_apart

    def _starting(self, function: Any) -> Any:
        """Refuse a process that imports everything again: it knows of no changed text, and writes by itself."""

        def start(popen: Any, process: Any) -> Any:
            if self._on:
                self._refuse(f"what a process started by {popen.method} writes cannot be kept apart")
            return function(popen, process)

        return start

    def _to_write(self, file: Any, *, copy: bool = False) -> Any:
        """Where a write goes; anything that is no path is what it is."""
        if not self._on or not _is_path(file):
            return file
        path = _whole(file)
        if self._passes(path):
            return file
        if path not in self._moved:
            # Forks of the script write here, too: each folder has a name of its own.
            new = str(Path(tempfile.mkdtemp(dir=self._folder), Path(path).name))
            if copy and Path(path).is_file():
                shutil.copyfile(path, new)
            self._moved[path] = new
        return self._moved[path]

    def _to_read(self, file: Any) -> Any:
        if not self._moved or not _is_path(file):
            return file
        return self._moved.get(_whole(file), file)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuse a write that comes by another way to a file that is there; remember what is new."""
        if not self._on or event not in ("open", "os.mkdir") or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY if event == "os.mkdir" else args[2]
        if not isinstance(flags, int) or not flags & _WRITES:
            return
        path = _whole(args[0])
        if flags & os.O_CREAT and not os.path.lexists(path):
            self._made.add(path)
        elif Path(path).is_file() and not flags & os.O_EXCL and not self._is_free(path):
            self._refuse(f"{path} would be written to")

    def _is_free(self, path: str) -> bool:
        """Whether nothing of the user's is there."""
        return path in self._made or not os.path.lexists(path) or self._passes(path)

    def _passes(self, path: str) -> bool:
        """Whether writes go there as they are: they are kept apart already, or change nothing that anybody made."""
        return path.startswith(_OUTSIDE) or _is_in(path, str(self._folder)) or _is_cache(path, self._home)

    def _forget(self, path: str) -> None:
        """Let go of a path, and of what is below it."""
        for known in [one for one in (*self._moved, *self._made) if one == path or _is_in(one, path)]:
            self._moved.pop(known, None)
            self._made.discard(known)

    def _refuse(self, what: str) -> None:
        self.refused.append(what)
        raise PermissionError(errno.EACCES, f"floatline tries a fix, and {what}")


def _move(function: Any, source: str, target: str) -> None:
    """Rename, also from one disk to another."""
    try:
        function(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, target)
        Path(source).unlink()


def _is_path(file: Any) -> bool:
    return isinstance(file, (str, os.PathLike))


def _whole(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link stays what it is called


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(folder + os.sep)


def _whole_within(path: Any, folder: int | None) -> str:
    """The whole path of one that is given within an open folder; itself where that folder is not to be known."""
    if folder is None:
        return _whole(path)
    with contextlib.suppress(OSError):
        return str(Path(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path)))  # noqa: PTH115 - no path of a file
    return os.fsdecode(path)


def _is_cache(path: str, home: Path) -> bool:
    """Whether it lies in a hidden folder, such as ~/.cache, or holds compiled code.

    Args:
        path: A whole path.
        home: Where the script was started. Hidden folders above it make no cache of what it writes.
    """
    whole = Path(path)
    above = whole.relative_to(home).parts[:-1] if whole.is_relative_to(home) else whole.parts[1:-1]
    return any(part.startswith(".") or part == "__pycache__" for part in above)
