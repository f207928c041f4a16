"""Excerpts: the part of a file that a rewrite looks at; each run of other statements is one line of it."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_MARK = "# floatline: lines "
_STANDS_FOR = re.compile(rf"^[ \t]*pass  {_MARK}(\d+)\r?$", re.MULTILINE)


@dataclass(frozen=True)
class SourceSpan:
    """Lines of a file, counted from 1.

    Args:
        first: The first one.
        last: The last one.
    """

    first: int
    last: int

    def holds(self, other: SourceSpan) -> bool:
        """Whether all of the other lines are among these."""
        return self.first <= other.first and other.last <= self.last


@dataclass(frozen=True)
class Excerpt:
    """Some lines of a file, with one line `pass` for each run of statements between them.

    Args:
        text: The excerpt, which is Python.
        cut: What each `pass` stands for.
        lines: The line in the file of each line of the excerpt.
    """

    text: str
    cut: tuple[str, ...]
    lines: tuple[int, ...]

    def line(self, number: int) -> int:
        """Where a line of the file that was kept stands in the excerpt."""
        return bisect_right(self.lines, number)

    def restore(self, text: str) -> str:
        """The whole file, where the text is an excerpt with changes."""
        return _STANDS_FOR.sub(lambda found: self.cut[int(found.group(1))], text)


def take_whole(text: str) -> Excerpt:
    """All of a file."""
    return Excerpt(text, (), tuple(range(1, text.count("\n") + 2)))


def cut_out(text: str, tree: ast.Module, *, alone: Iterable[SourceSpan], within: Iterable[SourceSpan]) -> Excerpt:
    """The part of a file that rewrites of some of its places look at.

    Args:
        text: The file.
        tree: The same, parsed.
        alone: Places whose rewrite looks at nothing else than its statement.
        within: Places whose rewrite looks at the innermost function around it, or at the file where there is none.
    """
    lines = text.split("\n")
    if _MARK in text or "\r" in text.replace("\r\n", ""):  # which ends a line for Python
        return take_whole(text)
    kept = [*alone]
    for place in within:
        around = _find_function(tree, place)
        if around is None:
            return take_whole(text)
        kept.append(around)
    new, numbers, cut, at = list[str](), list[int](), list[str](), 0
    for run in _find_runs(tree.body, lines, kept):
        new += lines[at : run.first - 1]
        numbers += range(at + 1, run.first)
        old = lines[run.first - 1 : run.last]
        new.append(f"{_indent(old[0])}pass  {_MARK}{len(cut)}" + ("\r" if old[-1].endswith("\r") else ""))
        numbers.append(run.first)
        cut.append("\n".join(old))
        at = run.last
    return Excerpt("\n".join([*new, *lines[at:]]), tuple(cut), (*numbers, *range(at + 1, len(lines) + 1)))


def find_bindings(tree: ast.Module, place: SourceSpan) -> list[SourceSpan]:
    """The statements that give the names in some lines what they stand for, those of the names in these, and so on."""
    lines = [one for one in ast.walk(tree) if isinstance(one, ast.stmt)]
    given = [(one, _names(_targets(one))) for one in lines if not _has_blocks(one)]
    at = [one for one in ast.walk(tree) if isinstance(one, ast.Name) and place.first <= one.lineno <= place.last]
    left, known, found = {one.id for one in at}, set[str](), list[SourceSpan]()
    while left:
        name = left.pop()
        known.add(name)
        for one, names in given:
            if name in names:
                found.append(_span(one))
                left |= _names([one]) - known
    return found


def _targets(node: ast.stmt) -> list[ast.AST]:
    if isinstance(node, ast.Assign):
        return [*node.targets]
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _has_blocks(node: ast.stmt) -> bool:
    return any(True for _ in _blocks(node) if _)


def _find_function(tree: ast.Module, place: SourceSpan) -> SourceSpan | None:
    """The lines of the innermost function around a place."""
    found: SourceSpan | None = None
    waiting: list[ast.AST] = [tree]
    while waiting:
        inside = [one for node in waiting for block in _blocks(node) for one in block if _span(one).holds(place)]
        found = next((_span(one) for one in inside if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))), found)
        waiting = [*inside]
    return found


def _find_runs(block: Sequence[ast.stmt], lines: Sequence[str], kept: Sequence[SourceSpan]) -> Iterator[SourceSpan]:
    """Runs of statements of a block, and of the blocks in it, that hold nothing of what is kept."""
    run: SourceSpan | None = None
    for span, nodes in _by_lines(block):
        start = lines[span.first - 1]
        # `if x: y`, and `elif`: what stands before it must stay.
        is_apart = nodes[0].col_offset == len(_indent(start)) and not start.lstrip().startswith("elif")
        if is_apart and not any(one.first <= span.last and span.first <= one.last for one in kept):
            run = span if run is None else SourceSpan(run.first, span.last)
            continue
        if run is not None:
            yield run
            run = None
        if not any(one.holds(span) for one in kept):
            for inner in (inner for node in nodes for inner in _blocks(node)):
                yield from _find_runs(inner, lines, kept)
    if run is not None:
        yield run


def header_lines(node: ast.stmt, text: str) -> range:
    """The lines of a statement; of one with a block, those before it."""
    span, lines = _span(node), text.split("\n")
    blocks = [block for block in _blocks(node) if block]
    if not blocks:
        return range(span.first, span.last + 1)
    last = max(span.first, _span(blocks[0][0]).first - 1)
    while last > span.first and not lines[last - 1].partition("#")[0].strip():  # a comment of the block's own
        last -= 1
    return range(span.first, last + 1)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        yield getattr(node, field, [])
    for field in ("handlers", "cases"):
        for one in getattr(node, field, []):
            yield one.body


def _by_lines(block: Sequence[ast.stmt]) -> Iterator[tuple[SourceSpan, list[ast.stmt]]]:
    """The statements of a block, those that share a line together."""
    span, nodes = SourceSpan(0, 0), list[ast.stmt]()
    for node in block:
        own = _span(node)
        if nodes and own.first <= span.last:
            span, nodes = SourceSpan(span.first, max(span.last, own.last)), [*nodes, node]
            continue
        if nodes:
            yield span, nodes
        span, nodes = own, [node]
    if nodes:
        yield span, nodes


def _span(node: ast.stmt) -> SourceSpan:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return SourceSpan(min([node.lineno, *(one.lineno for one in decorators)]), node.end_lineno or node.lineno)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
