"""Commands of shell scripts that start a Python program, as documents: `--fp16` and `trainer.precision=16`.

A script is read as text, and nothing in it is run or expanded.
"""

from __future__ import annotations

import bisect
import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from floatline.lint.configs.files import read_word
from floatline.lint.configs.view import UNKNOWN, Path, RunConfig, Setting, SettingsDocument

SHELL_ENDINGS = (".sh", ".bash")
# A comment, what ends a command, a word, or a quote that its line leaves open. Hardly two parts fit the same character,
# so that no line takes long.
_PARTS = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<end>[;|&()<>\n]+)"""
    r"""|(?:\$\([^()\n]*\)|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|\\.|[^\s"'\\;|&()<>])+"""
    r"""|(?P<open>["'\\][^\n]*)"""
)
_CONTINUED = re.compile(r"\\\r?\n")
_STARTS = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|.*\.py")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


def read_commands(text: str, file: str) -> Iterator[SettingsDocument]:
    """One document for each command that starts a Python program. What it does not say, the program may."""
    ends = [found.end() for found in re.finditer("\n", text)]
    for words in _split(text):
        names = [PurePosixPath(_unquote(word)).name for word in words]
        start = next((place for place, name in enumerate(names) if _STARTS.fullmatch(name)), len(names))
        program = next((place for place in range(start, len(names)) if names[place].endswith(".py")), start)
        document = SettingsDocument(file, text, is_open=True)
        if names[start : start + 2] == ["accelerate", "launch"]:
            own = _read_words(ends, words[start:program], ("accelerate",))
            place = next(iter(own.values()), None)
            if place is not None:
                document.configs = (RunConfig("accelerate", place.path[:1], document, place, is_open=True),)
            document.settings = own
        document.settings = {**document.settings, **_read_words(ends, words[program + 1 :], ())}
        if document.settings:
            yield document


def _split(text: str) -> Iterator[list[re.Match[str]]]:
    """The words of each command, with their places."""
    words: list[re.Match[str]] = []
    # A line that goes on is one command; its length stays, for the places.
    for part in _PARTS.finditer(_CONTINUED.sub(lambda found: " " * len(found[0]), text)):
        if part["end"]:
            yield words
        if part["end"] or part["open"]:
            words = []
        elif not part["comment"]:
            words.append(part)
    yield words


def _read_words(ends: list[int], words: list[re.Match[str]], root: Path) -> dict[Path, Setting]:
    """Hydra's overrides (`trainer.precision=16`) and options (`--fp16`, `--seed 1`, `--seed=1`); of two the later."""
    found: dict[Path, Setting] = {}
    for place, word in enumerate(words):
        last, said = word, _unquote(word)
        option, override = _OPTION.fullmatch(said), _OVERRIDE.fullmatch(said)
        if option is not None:
            key, value = option[1].replace("-", "_"), option[2]
            behind = _unquote(words[place + 1]) if place + 1 < len(words) else "--"
            if value is None and not behind.startswith("--") and _OVERRIDE.fullmatch(behind) is None:
                last, value = words[place + 1], behind
        elif override is not None:
            key, value = override[1], override[2]
        else:
            continue
        path = (*root, *key.split("."))
        known = True if value is None else UNKNOWN if "$" in value or "`" in value else read_word(value)
        found[path] = Setting(path, known, *_place(ends, word.start()), *_place(ends, last.end()))
    return found


def _unquote(word: re.Match[str]) -> str:
    try:
        return "".join(shlex.split(word[0]))
    except ValueError:
        return word[0]


def _place(ends: list[int], at: int) -> tuple[int, int]:
    """Line and column of a character, both counted from 1."""
    line = bisect.bisect_right(ends, at)
    return line + 1, at - (ends[line - 1] if line else 0) + 1
