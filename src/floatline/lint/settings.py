"""What a project asks of the linter: `[tool.floatline.lint]` in pyproject.toml."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from floatline.base.files import read_bounded
from floatline.errors import LintError, suggest


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: It is not TOML.
    """
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    loads: Callable[[str], dict[str, Any]] = importlib.import_module(name).loads
    return loads(text)


_KEYS = ("select", "ignore", "exclude", "on", "baseline", "half")


@dataclass(frozen=True)
class Settings:
    """What is looked at, and by which rules.

    Args:
        select: Codes, beginnings of codes ('FL1') or names of rules; empty is all.
        ignore: The same, left out.
        exclude: Patterns of paths that are not looked at, as `fnmatch` reads them.
        on: The hardware that the code is for, such as 'sm_75' or 't4'; '' is not known.
        baseline: File of findings that are known and not told again; '' is none.
        half: Whether what holds in pure half only is told of, wherever it stands.
        root: The folder that the paths in `exclude` and `baseline` begin at.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    on: str = ""
    baseline: str = ""
    half: bool = False
    root: Path = field(default_factory=Path)


def read_settings(start: Path) -> Settings:
    """The settings of the project that a path belongs to: the nearest pyproject.toml above it that has some.

    Raises:
        LintError: The file cannot be read, or a setting in it is wrong.
    """
    start = start.resolve()
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if not file.is_file():
            continue
        try:
            table: Any = parse_toml(read_bounded(file).decode("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise LintError(f"{file} cannot be read: {error}. Fix it, or call from another folder.") from None
        for name in ("tool", "floatline", "lint"):
            table = table.get(name) if isinstance(table, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if isinstance(table, dict):
            return _check(table, file)  # pyright: ignore[reportUnknownArgumentType]
    return Settings()


def _check(table: dict[str, Any], file: Path) -> Settings:
    settings = Settings(root=file.parent)
    for key, value in table.items():
        if key not in _KEYS:
            raise LintError(f"Setting {key!r} in [tool.floatline.lint] of {file} is not known. {suggest(key, _KEYS)}")
        if key == "half":
            if not isinstance(value, bool):
                raise LintError(f"Setting 'half' in [tool.floatline.lint] of {file} is {value!r}. Give true or false.")
            settings = replace(settings, half=value)
            continue
        is_list = key in ("select", "ignore", "exclude")
        items: Any = value if is_list else [value]
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):  # pyright: ignore[reportUnknownVariableType]
            wanted = "a list of strings" if is_list else "a string"
            raise LintError(f"Setting {key!r} in [tool.floatline.lint] of {file} is {value!r}. Give {wanted}.")
        settings = replace(settings, **{key: tuple(items) if is_list else value})  # pyright: ignore[reportUnknownArgumentType]
    return settings
