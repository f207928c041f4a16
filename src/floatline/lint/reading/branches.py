"""The ways through a block of code: what happens on each, where two `if`s with the same test agree."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Ending = Literal["end", "continue", "break", "return", "raise"]
Known = dict[str, bool]
T = TypeVar("T")
_MOST = 400  # ways; code with more is not judged


@dataclass(frozen=True)
class BranchStep(Generic[T]):
    """Something that happens."""

    event: T


@dataclass(frozen=True)
class BranchChoice(Generic[T]):
    """An `if`."""

    test: ast.expr
    body: tuple[Piece[T], ...]
    orelse: tuple[Piece[T], ...]


@dataclass(frozen=True)
class Turns(Generic[T]):
    """A loop. `assigned`: the names that each turn may change."""

    body: tuple[Piece[T], ...]
    assigned: frozenset[str]


@dataclass(frozen=True)
class Jump:
    """`continue`, `break`, `return` or `raise`."""

    kind: Ending
    node: ast.stmt


Piece = BranchStep[T] | BranchChoice[T] | Turns[T] | Jump


@dataclass(frozen=True)
class Way(Generic[T]):
    """One way through a block.

    Args:
        events: What happens, in order.
        ending: How it ends.
        at: The statement that ends it, where one does.
        known: Tests and what they came out as on this way.
        tests: The tests of the `if`s around the statement that ends it.
    """

    events: tuple[T, ...] = ()
    ending: Ending = "end"
    at: ast.stmt | None = None
    known: Known = field(default_factory=dict[str, bool])
    tests: tuple[ast.expr, ...] = ()


class TooManyError(Exception):
    """There are more ways than are looked at."""


def find_ways(
    pieces: Sequence[Piece[T]], known: Known, *, turns: int = 1, assigned: frozenset[str] = frozenset()
) -> list[Way[T]]:
    """Every way through a block; none where there are too many.

    Args:
        pieces: The block.
        known: Tests whose outcome is known before.
        turns: How often the whole block is run; `continue` ends a turn.
        assigned: Names that a turn changes: what is known of them holds for one turn.
    """
    try:
        if turns == 1:
            return list(_block(tuple(pieces), Way(known=known)))
        return list(_repeat(tuple(pieces), Way(known=known), assigned, turns, keeps_ending=True))
    except TooManyError:
        return []


def _block(pieces: tuple[Piece[T], ...], start: Way[T]) -> Iterator[Way[T]]:
    ways = [start]
    for piece in pieces:
        further: list[Way[T]] = []
        for way in ways:
            if way.ending != "end":
                further.append(way)
            else:
                further.extend(_pass(piece, way))
            if len(further) > _MOST:
                raise TooManyError
        ways = further
    yield from ways


def _pass(piece: Piece[T], way: Way[T]) -> Iterator[Way[T]]:
    if isinstance(piece, BranchStep):
        yield Way((*way.events, piece.event), known=way.known)
    elif isinstance(piece, Jump):
        yield Way(way.events, piece.kind, piece.node, way.known)
    elif isinstance(piece, Turns):
        yield from _repeat(piece.body, way, piece.assigned, 2)
    else:
        outcome = judge(piece.test, way.known)
        for side, block in ((True, piece.body), (False, piece.orelse)):
            if outcome is not None and outcome != side:
                continue
            known = {**way.known, **learn(piece.test, side)}
            for one in _block(block, Way(way.events, known=known)):
                tests = (piece.test, *one.tests) if one.at is not None else ()
                yield Way(one.events, one.ending, one.at, one.known, tests)


def _repeat(
    body: tuple[Piece[T], ...], way: Way[T], assigned: frozenset[str], turns: int, *, keeps_ending: bool = False
) -> Iterator[Way[T]]:
    """A loop of so many turns. Where it keeps the ending, that of its first turn stands in `at` and `tests`."""
    ways = [way]
    for turn in range(turns):
        further: list[Way[T]] = []
        for before in ways:
            if before.ending in ("break", "return", "raise"):
                further.append(before)
                continue
            known = (
                {test: out for test, out in before.known.items() if not _names(test) & assigned}
                if turn
                else before.known
            )
            for one in _block(body, Way(before.events, known=known)):
                ending = "end" if one.ending == "continue" else one.ending
                first = before if turn and before.at is not None else one
                further.append(Way(one.events, ending, first.at, one.known, first.tests))
            if len(further) > _MOST:
                raise TooManyError
        ways = further
    for one in ways:
        if keeps_ending:
            yield one
        else:
            yield Way(one.events, "end" if one.ending == "break" else one.ending, None, one.known)


def _names(text: str) -> frozenset[str]:
    return frozenset("".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split())


def learn(test: ast.expr, outcome: bool) -> Known:
    """What is known once a test came out so: of `a and b` both, where it held."""
    atom, sign = _atom(test)
    if isinstance(atom, ast.BoolOp) and isinstance(atom.op, ast.And if outcome == sign else ast.Or):
        return {key: value for part in atom.values for key, value in learn(part, outcome == sign).items()}
    text = spell(atom)
    known = {text: outcome == sign}
    if text.endswith(" is not None") and outcome != sign:
        known[text.removesuffix(" is not None")] = False
    elif outcome == sign and isinstance(atom, (ast.Name, ast.Attribute)):
        known[f"{text} is not None"] = True
    return known


def judge(test: ast.expr, known: Known) -> bool | None:
    """How a test comes out; None where it may do either."""
    atom, sign = _atom(test)
    if isinstance(atom, ast.Constant):
        return bool(atom.value) == sign
    if isinstance(atom, ast.BoolOp):
        parts = [judge(part, known) for part in atom.values]
        decisive = isinstance(atom.op, ast.Or)
        if decisive in parts:
            return decisive == sign
        if None not in parts:
            return (not decisive) == sign
    told = known.get(spell(atom))
    return None if told is None else told == sign


def _atom(test: ast.expr) -> tuple[ast.expr, bool]:
    """A test without its negations, and whether there was an even number of them."""
    sign = True
    while True:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, sign = test.operand, not sign
        elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.NotEq)):
            other = ast.IsNot() if isinstance(test.ops[0], ast.Is) else ast.Eq()
            return ast.Compare(test.left, [other], test.comparators), not sign
        else:
            return test, sign


def spell(test: ast.expr) -> str:
    """A test as a key. `args.amp`, `self.amp` and `amp` are one: settings are handed on under their name."""
    if isinstance(test, ast.Attribute):
        return test.attr
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Attribute):
        return ast.unparse(ast.Compare(ast.Name(test.left.attr), test.ops, test.comparators))
    if (
        isinstance(test, ast.Call)
        and isinstance(test.func, ast.Attribute)
        and isinstance(test.func.value, ast.Attribute)
    ):
        return ast.unparse(
            ast.Call(ast.Attribute(ast.Name(test.func.value.attr), test.func.attr), test.args, test.keywords)
        )
    return ast.unparse(test)
