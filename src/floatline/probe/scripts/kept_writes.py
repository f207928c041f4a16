"""KeptWrites: what a script writes while it is tried goes to another folder, and its own files stay as they are."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
_OUTSIDE = ("/dev/", "/proc/", "/sys/")


class KeptWrites:
    """Sends writes to a folder, and reads of what was written there after them.

    Covered are `open`, `pathlib`, torch.save, safetensors, and removing or renaming by `os` and `shutil`. A write to a
    file that is there by any other way is refused. New files and folders, and caches in hidden folders, are let
    through.

    Attributes:
        refused: What the script could not be allowed, as one line each.

    Args:
        folder: Where writes go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._moved: dict[str, str] = {}
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
            inside = self._to_read(src)
            if not self._on or named or inside is src:
                return function(src, dst, **named) if not self._on else self._refuse(f"{src} would be renamed")
            function(inside, self._to_write(dst))
            del self._moved[_whole(src)]
            return None

        return rename_apart

    def _removing(self, function: Any) -> Any:
        def remove_apart(path: Any, *args: Any, **named: Any) -> Any:
            inside = self._to_read(path)
            if not self._on or isinstance(path, int):
                return function(path, *args, **named)
            if inside is not path:
                del self._moved[_whole(path)]
                return function(inside, *args, **named)
            if os.path.lexists(path) and not _is_cache(_whole(path)):
                self._refuse(f"{path} would be removed")
            return function(path, *args, **named)

        return remove_apart

    def _to_write(self, file: Any, *, copy: bool = False) -> Any:
        """Where a write goes; anything that is no path is what it is."""
        if not self._on or not _is_path(file):
            return file
        path = _whole(file)
        if path.startswith(_OUTSIDE) or _is_cache(path):
            return file
        if path not in self._moved:
            new = self._folder / str(len(self._moved)) / Path(path).name
            new.parent.mkdir(parents=True)
            if copy and Path(path).is_file():
                self._on = False
                shutil.copyfile(path, new)
                self._on = True
            self._moved[path] = str(new)
        return self._moved[path]

    def _to_read(self, file: Any) -> Any:
        if not self._moved or not _is_path(file):
            return file
        return self._moved.get(_whole(file), file)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuse a write that comes by another way to a file that is there."""
        if not self._on or event != "open" or not isinstance(args[0], (str, bytes)):
            return
        path, flags = os.fsdecode(args[0]), args[2]
        if not isinstance(flags, int) or not flags & _WRITES or flags & os.O_EXCL or not Path(path).is_file():
            return
        whole = _whole(path)
        if not whole.startswith((*_OUTSIDE, str(self._folder))) and not _is_cache(whole):
            self._refuse(f"{path} would be written to")

    def _refuse(self, what: str) -> None:
        self.refused.append(what)
        raise PermissionError(errno.EACCES, f"floatline tries a fix, and {what}")


def _is_path(file: Any) -> bool:
    return isinstance(file, (str, os.PathLike))


def _whole(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link stays what it is called


def _is_cache(path: str) -> bool:
    """Whether it lies in a hidden folder, such as ~/.cache, or holds compiled code."""
    return any(part.startswith(".") or part == "__pycache__" for part in Path(path).parts[1:-1])
