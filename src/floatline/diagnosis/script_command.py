"""Command: the words of `floatline diagnose -- python train.py`, taken apart. Without torch."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from floatline.errors import TargetError

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_HELP = "Give 'python train.py ...', 'python -m package.module ...' or 'train.py ...'."


@dataclass(frozen=True)
class Command:
    """A command that runs Python code.

    Args:
        python: Path of the interpreter.
        options: Options of the interpreter, such as '-u'.
        words: The script's file, or '-m' and a module, and its arguments.
    """

    python: str
    options: tuple[str, ...]
    words: tuple[str, ...]


def parse_command(words: list[str]) -> Command:
    """Take a command apart.

    Raises:
        TargetError: It is empty, runs no Python code, or names an interpreter or a script that is not there.
    """
    if not words:
        raise TargetError(f"No command was given after '--'. {_HELP}")
    first, *rest = words
    if not _PYTHON.fullmatch(Path(first).name):
        if not first.endswith(".py"):
            raise TargetError(f"Command '{first}' is not Python. {_HELP}")
        return Command(sys.executable, (), (_check_script(first), *rest))
    python = shutil.which(first)
    if python is None:
        raise TargetError(f"There is no interpreter '{first}'. {_HELP}")
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "-m" and rest:
            return Command(python, tuple(options), ("-m", *rest))
        if word in ("-c", "-m", "-i") or word.startswith(("-c", "--help", "--version")):
            raise TargetError(f"Option '{word}' of {first} leaves no script to observe. {_HELP}")
        options.append(word)
        if word in _WITH_VALUE and rest:
            options.append(rest.pop(0))
    if not rest or rest[0] == "-":
        raise TargetError(f"'{first}' alone runs no script. {_HELP}")
    return Command(python, tuple(options), (_check_script(rest[0]), *rest[1:]))


def _check_script(file: str) -> str:
    path = Path(file)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise TargetError(f"Script '{file}' is a folder without __main__.py. Name the file to run.")
    if not path.exists():
        raise TargetError(f"There is no script '{file}'. Check the path, which is taken from the current folder.")
    return file
