"""What a linted tree never names: a function or a class that no line of it calls, imports, exports or configures."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable

from floatline.lint.reading.source import Source

_COMMENT = re.compile(r"^[ \t]*#.*", re.MULTILINE)
_Owner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find_owner(source: Source, node: ast.AST) -> str:
    """The outermost function or class around a node; '' where it has none, or where its file names it elsewhere.

    What a decorator takes is named there: it may be registered under any name.
    """
    above = [one for one in source.ancestors(node) if isinstance(one, _Owner)]
    if not above or above[-1].decorator_list:
        return ""
    owner = above[-1]
    rest = [*source.lines[: owner.lineno - 1], *source.lines[owner.end_lineno or owner.lineno :]]
    return "" if _find_mentions([owner.name], "\n".join(rest)) else owner.name


def find_unnamed(owners: Iterable[str], files: Iterable[str], read: Callable[[str], str]) -> frozenset[str]:
    """Those of some functions and classes that no file of a tree names, but where they are made.

    Args:
        owners: What `find_owner` gave.
        files: The files of the tree.
        read: The text of a file; what cannot be read names nothing.
    """
    left = {owner for owner in owners if owner}
    for file in files:
        if not left:
            break
        try:
            text = read(file)
        except (OSError, ValueError):
            continue
        left.difference_update(_find_mentions(left, text))
    return frozenset(left)


def _find_mentions(names: Iterable[str], text: str) -> set[str]:
    """Those of some names that a text has, other than behind `def` or `class`, in super(), or in a line of comment."""
    pattern = re.compile(rf"(?<!\bdef )(?<!\bclass )(?<!\bsuper\()\b({'|'.join(map(re.escape, sorted(names)))})\b")
    found = set(pattern.findall(text))
    return set(pattern.findall(_COMMENT.sub("", text))) if found else found
