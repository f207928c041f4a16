"""What a linted tree never names: a function or a class that no line of it calls, imports, exports or configures."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable

from floatline.lint.reading.source import Source

_COMMENT = re.compile(r"^[ \t]*#.*", re.MULTILINE)
_Owner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find_owners(source: Source, node: ast.AST) -> tuple[str, ...]:
    """The outermost function or class around a node, and those of its file that name it, and those that name these.

    None where the file itself names one of them, or a decorator takes one: it may be registered under any name.
    """
    above = [one for one in source.ancestors(node) if isinstance(one, _Owner)]
    found, waiting = dict[str, ast.AST](), above[-1:]
    while waiting:
        owner = waiting.pop()
        if owner.decorator_list:
            return ()
        found[owner.name] = owner
        for one in source.tree.body:
            if one is owner or not _find_mentions([owner.name], _text(source, one, without=owner)):
                continue
            if not isinstance(one, _Owner):
                return ()
            if one.name not in found:
                waiting.append(one)
    return tuple(found)


def find_unnamed(
    owners: Iterable[tuple[str, str]], files: Iterable[str], read: Callable[[str], str]
) -> frozenset[tuple[str, str]]:
    """Those of some functions and classes that no other file of a tree names.

    Args:
        owners: What `find_owners` gave, each behind its file.
        files: The files of the tree.
        read: The text of a file; what cannot be read names nothing.
    """
    left = set(owners)
    for file in files:
        if not left:
            break
        try:
            text = read(file)
        except (OSError, ValueError):
            continue
        others = {name for made_in, name in left if made_in != file}
        named = _find_mentions(others, text) if others else others
        left = {(made_in, name) for made_in, name in left if made_in == file or name not in named}
    return frozenset(left)


def _text(source: Source, node: ast.stmt, *, without: ast.stmt) -> str:
    """The lines of a statement that are none of another's."""
    left = range(without.lineno, (without.end_lineno or without.lineno) + 1)
    numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return "\n".join(source.lines[number - 1] for number in numbers if number not in left)


def _find_mentions(names: Iterable[str], text: str) -> set[str]:
    """Those of some names that a text has, other than behind `def` or `class`, in super(), or in a line of comment."""
    pattern = re.compile(rf"(?<!\bdef )(?<!\bclass )(?<!\bsuper\()\b({'|'.join(map(re.escape, sorted(names)))})\b")
    found = set(pattern.findall(text))
    return set(pattern.findall(_COMMENT.sub("", text))) if found else found
