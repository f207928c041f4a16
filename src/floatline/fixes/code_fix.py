"""CodeFix: one change of a source file, and the diff that makes it."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from floatline.fixes.excerpts import header_lines


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
        """What stands there afterwards; of lines that are only taken out, what is done.

        A line alone is itself; several are whole statements, indented from the first one on, and those of several
        places stand under comments with their lines in the file as it is.
        """
        was, new = _old_lines_of(self.before, self.after), _rows(self.after)
        changed = [at for at in self._put_in() if new[at - 1].strip()]
        if len(changed) < 2:
            return new[changed[0] - 1].strip() if changed else self.says
        parts = _split(_whole_statements(self.after, changed), new)
        codes = ["\n".join(_outdent(new[first - 1 : last])) for first, last in parts]
        if len(parts) > 1:
            codes = [f"# line {was[first]}\n{code}" for (first, _), code in zip(parts, codes, strict=True)]
        return "\n".join(codes)

    @property
    def old_lines(self) -> set[int]:
        """The lines of the statements that are changed, as they are in the file before."""
        gone = [at for tag, first, last, _, _ in _compare(self.before, self.after) if tag for at in range(first, last)]
        return _whole_statements(self.before, [at + 1 for at in gone])

    @property
    def new_lines(self) -> set[int]:
        """The lines of the statements that are changed, as they are in the file afterwards."""
        return _whole_statements(self.after, self._put_in())

    def _put_in(self) -> list[int]:
        return [
            at + 1 for tag, _, _, first, last in _compare(self.before, self.after) if tag for at in range(first, last)
        ]

    @property
    def patch(self) -> str:
        """The change as a unified diff."""
        return draw_diff(self.name, self.before, self.after)


def merge_fixes(fixes: Sequence[CodeFix]) -> list[CodeFix]:
    """Changes made one after the other, without those whose line lies in the lines of another one of them.

    Args:
        fixes: Changes; each of a file begins with what the one before it made of that file.
    """
    left, at = [*fixes], 0
    while at < len(left):
        own = left[at]
        same = [i for i, other in enumerate(left) if i != at and other.file.resolve() == own.file.resolve()]
        earlier, later = [i for i in same if i < at], [i for i in same if i > at]
        is_inside = any(own.line in left[i].new_lines for i in earlier)
        if not is_inside and not any(own.line in left[i].old_lines for i in later):
            at += 1
            continue
        if later:
            left[later[0]] = replace(left[later[0]], before=own.before)
        else:
            left[earlier[-1]] = replace(left[earlier[-1]], after=own.after)
        del left[at]
    return left


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


def _compare(before: str, after: str) -> list[tuple[str, int, int, int, int]]:
    """Which lines, from one to before another, became which; with '' where they are the same."""
    places = difflib.SequenceMatcher(None, _rows(before), _rows(after), autojunk=False).get_opcodes()
    return [
        ("" if tag == "equal" else tag, old, old_last, new, new_last) for tag, old, old_last, new, new_last in places
    ]


def _rows(text: str) -> list[str]:
    """Lines without their ends, as Python counts them."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def _old_lines_of(before: str, after: str) -> dict[int, int]:
    """The line before that each line afterwards stands for, or stands behind; all counted from 1."""
    found: dict[int, int] = {}
    for _, old_first, old_last, first, last in _compare(before, after):
        for at in range(first, last):
            found[at + 1] = min(old_first + at - first, max(old_last - 1, old_first)) + 1
    return found


def _whole_statements(text: str, lines: Collection[int]) -> set[int]:
    """Lines with all others of the statements that they are of; of one with a block, of its head."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {*lines}
    found = {*lines}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            own = header_lines(node, text)
            found |= {*own} if not found.isdisjoint(own) else set()
    return found


def _split(shown: Collection[int], lines: Sequence[str]) -> list[tuple[int, int]]:
    """First and last lines of what stands together; blank lines part nothing, and what is further out does."""
    found: list[tuple[int, int]] = []
    for at in sorted(shown):
        if found:
            first, last = found[-1]
            is_next = not any(line.strip() for line in lines[last : at - 1])
            if is_next and (_width(lines[at - 1]) >= _width(lines[first - 1]) or not lines[at - 1].strip()):
                found[-1] = (first, at)
                continue
        found.append((at, at))
    return found


def _outdent(lines: Sequence[str]) -> list[str]:
    """Lines without the indentation of the first one."""
    head = lines[0][: _width(lines[0])]
    return [line.removeprefix(head).rstrip() for line in lines]


def _width(line: str) -> int:
    return len(line) - len(line.lstrip())
