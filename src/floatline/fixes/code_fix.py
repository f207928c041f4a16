"""CodeFix: one change of a source file, and the diff that makes it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CodeFix:
    """One change of a source file. The file itself is left alone.

    Args:
        file: The file.
        name: Its path in the patch, with slashes.
        line: The line that is changed, counted from 1.
        kind: What is done, such as 'log-sigmoid'.
        says: The same for people, as one line.
        safe: Whether the changed code is the same function in exact arithmetic.
        before: The whole file.
        after: The whole file with the change.
    """

    file: Path
    name: str
    line: int
    kind: str
    says: str
    safe: bool
    before: str
    after: str

    @property
    def new_code(self) -> str:
        """What stands there afterwards, in one line; of lines that are only taken out, what is done."""
        lines = [line[1:].strip() for line in self.patch.splitlines()[2:] if line.startswith("+")]
        return "; ".join(line for line in lines if line).replace(":; ", ": ") or self.says

    @property
    def patch(self) -> str:
        """The change as a unified diff."""
        return draw_diff(self.name, self.before, self.after)


def join_patches(fixes: Sequence[CodeFix]) -> str:
    """One diff for several changes; of two changes to the same lines, the first is taken.

    Args:
        fixes: Changes, each made from the same state of its file.
    """
    names = dict.fromkeys(fix.name for fix in fixes)
    return "".join(_join_file([fix for fix in fixes if fix.name == name]) for name in names)


def _join_file(fixes: list[CodeFix]) -> str:
    before = fixes[0].before
    old = _lines(before)
    changes: list[tuple[int, int, list[str]]] = []
    for fix in fixes:
        new = _lines(fix.after)
        for tag, start, end, new_start, new_end in difflib.SequenceMatcher(
            None, old, new, autojunk=False
        ).get_opcodes():
            if tag != "equal" and not any(start <= other_end and other <= end for other, other_end, _ in changes):
                changes.append((start, end, new[new_start:new_end]))
    result = list(old)
    for start, end, lines in sorted(changes, key=lambda change: change[0], reverse=True):
        result[start:end] = lines
    return draw_diff(fixes[0].name, before, "".join(result))


def draw_diff(name: str, before: str, after: str) -> str:
    """A unified diff."""
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines with their ends; only \\n ends one, as for patch."""
    parts = text.split("\n")
    return [part + "\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
