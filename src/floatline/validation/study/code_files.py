"""The files that a target's code lies in, with checksums: its own, and those of the project that it imports."""

from __future__ import annotations

import ast
import hashlib
import shlex
from collections.abc import Iterator
from pathlib import Path

MOST_FILES = 2_000
LARGEST_FILE = 16 << 20


def target_code(target: str, root: Path) -> dict[str, str]:
    """SHA-256 of each file of a target, by its path from the root; empty where no file is found.

    Nothing is run: imports are read from the source, also those inside functions. Modules that are not below the
    root, such as installed packages, are not followed; their versions are the environment's.

    Args:
        target: FILE.py, package.module, or either with :name.
        root: Folder of the project.
    """
    path = _find_target(target)
    return {} if path is None else _hash_all([path], root)


def command_code(command: str, cwd: Path, root: Path) -> dict[str, str]:
    """The same of a command that runs in the folder `cwd`: its words that are files, and what they import."""
    try:
        words = shlex.split(command)
    except ValueError:
        return {}
    # The program itself, such as python, is part of the environment.
    own = [cwd / word for word in words[1:] if not word.startswith("-")]
    return _hash_all([path for path in own if path.is_file()], root)


def changed_file(code: dict[str, str], root: Path) -> str:
    """The first file that is not what it was, and how; '' where all are."""
    for name, digest in code.items():
        path = root / name
        if not path.is_file():
            return f"{name} is gone"
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return f"{name} was changed"
    return ""


def _hash_all(waiting: list[Path], root: Path) -> dict[str, str]:
    root, found = root.resolve(), dict[str, str]()
    seen: set[Path] = set()
    while waiting and len(seen) < MOST_FILES:
        path = waiting.pop(0).resolve()
        if path in seen or not path.is_file() or path.stat().st_size > LARGEST_FILE:
            continue
        seen.add(path)
        data = path.read_bytes()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
        found[name] = hashlib.sha256(data).hexdigest()
        if path.suffix == ".py":
            waiting += [own for own in _imported(data, path, root) if _is_own(own, root)]
    return dict(sorted(found.items()))


def _find_target(target: str) -> Path | None:
    place, _, name = target.rpartition(":")
    place = place if place and name.isidentifier() else target
    if Path(place).is_file():
        return Path(place)
    return next(_module_files(place, [Path.cwd(), Path.cwd() / "src"]), None)


def _imported(source: bytes, path: Path, root: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    folders = [path.parent, root, root / "src", Path.cwd().resolve()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(alias.name, folders)
        elif isinstance(node, ast.ImportFrom):
            base = folders
            if node.level:
                base = [path.parents[node.level - 1]] if node.level <= len(path.parents) else []
            stem = node.module or ""
            yield from _module_files(stem, base)
            for alias in node.names:
                yield from _module_files(f"{stem}.{alias.name}".lstrip("."), base)


def _module_files(name: str, folders: list[Path]) -> Iterator[Path]:
    """The file of a module, and the __init__ of each package on the way, in the first folder that has it."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return
    for folder in folders:
        whole = folder.joinpath(*parts)
        file = next((path for path in (whole.with_suffix(".py"), whole / "__init__.py") if path.is_file()), None)
        if file is None:
            continue
        yield file
        for depth in range(1, len(parts)):
            package = folder.joinpath(*parts[:depth], "__init__.py")
            if package.is_file():
                yield package
        return


def _is_own(path: Path, root: Path) -> bool:
    full = path.resolve()
    if not full.is_relative_to(root):
        return False
    inside = full.relative_to(root).parts
    return not any(part.startswith(".") or part in ("site-packages", "node_modules") for part in inside)
