"""Rewrites at given places of a file: the nodes are found again by where they stand, and exchanged."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import libcst as cst
import libcst.matchers as m
from libcst.metadata import CodeRange, MetadataWrapper

from floatline.fixes import expressions
from floatline.fixes.excerpts import Excerpt, SourceSpan, cut_out, find_bindings, take_whole
from floatline.fixes.kinds import ALONE, EXPRESSIONS, STATEMENTS, FixKind
from floatline.fixes.names import Names, names_in_tree
from floatline.fixes.operations import count_calls, read_number, same
from floatline.fixes.origins import ConstantReader
from floatline.fixes.scope import find_made, find_path, find_positions, find_statement
from floatline.fixes.statements import NewStatements

_Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


@dataclass(frozen=True)
class NodePlace:
    """An expression or a statement, by its lines and columns, all counted from 1; the end is behind its last character.

    Args:
        line: Where it begins.
        column: Where it begins.
        end_line: Where it ends.
        end_column: Where it ends.
        kind: What is to be done there.
    """

    line: int
    column: int
    end_line: int
    end_column: int
    kind: FixKind


def rewrite_places(text: str, places: Sequence[NodePlace], *, unsafe: bool = False) -> tuple[str, list[NodePlace]]:
    """A file with the rewrites made, and the places where one was.

    Of places inside each other only the outermost is rewritten; the next call sees the rest.

    Args:
        text: The file.
        places: What to do where. A place whose rewrite does not fit it stays as it is.
        unsafe: Whether rewrites that are not the same function in exact arithmetic are made too.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text, []
    alone = [SourceSpan(place.line, place.end_line) for place in places if place.kind in ALONE]
    within = [SourceSpan(place.line, place.end_line) for place in places if place.kind not in ALONE]
    for place in places:  # the sign of a constant that has a name stands where it is made
        span = SourceSpan(place.line, place.end_line)
        alone += find_bindings(tree, span) if place.kind == "mask-constant" else ()
    for excerpt in (cut_out(text, tree, alone=alone, within=within), take_whole(text)):
        try:
            wrapper = MetadataWrapper(cst.parse_module(excerpt.text), unsafe_skip_copy=True)
        except (cst.ParserSyntaxError, RecursionError):
            continue
        there = {_move(place, excerpt): place for place in places}
        new, done = _rewrite(wrapper, [*there], names_in_tree(tree), unsafe=unsafe)
        return (excerpt.restore(new) if done else text), [there[place] for place in done]
    return text, []


def _move(place: NodePlace, excerpt: Excerpt) -> NodePlace:
    return replace(place, line=excerpt.line(place.line), end_line=excerpt.line(place.end_line))


def _rewrite(
    wrapper: MetadataWrapper, places: Sequence[NodePlace], names: Names, *, unsafe: bool
) -> tuple[str, list[NodePlace]]:
    positions = find_positions(wrapper)
    new_nodes: dict[cst.CSTNode, cst.BaseExpression] = {}
    new_lines: dict[cst.CSTNode, NewStatements] = {}
    nodes = _expressions_at(positions, {_key(place) for place in places if place.kind in EXPRESSIONS})
    done: list[NodePlace] = []
    for place in places:
        around = find_statement(wrapper.module, positions, place.line)
        made = {} if around is None else find_made(around.around, positions, place.line)
        limit = read_number if around is None else ConstantReader(wrapper.module, around.around, names).read
        scene = expressions.FixContext(names, made, is_sure=True, is_measured=False, limit=limit)
        if place.kind in STATEMENTS:
            new = None if around is None else STATEMENTS[place.kind](around.line, around.around, scene)
            if around is not None and new is not None and around.line not in new_lines:
                new_lines[around.line] = new
                done.append(place)
            continue
        for node in nodes.get(_key(place), ()):
            change = EXPRESSIONS[place.kind](node, scene)
            if change is None or not (change.safe or unsafe):
                continue
            kept = keep_calls(node, change.node, scene, wrapper.module if around is None else around.around)
            if kept is None or not _fits(kept, new_nodes, new_lines):
                continue
            new_lines.update({} if kept.line is None or kept.bound is None else {kept.line: kept.bound})
            new_nodes[node] = _in_same_parentheses(node, kept.node)
            done.append(place)
            break
    return (wrapper.module.visit(Put(new_nodes, new_lines)).code if done else ""), done


@dataclass(frozen=True)
class KeptCalls:
    """A rewrite that runs every layer as often as before, and draws as many random numbers.

    Args:
        node: The new expression.
        line: The statement that made a name which the rewrite looks through; None where it needs no change.
        bound: The same with a name for what the rewrite takes out of it.
    """

    node: cst.BaseExpression
    line: cst.SimpleStatementLine | None = None
    bound: NewStatements | None = None


def keep_calls(
    old: cst.BaseExpression, new: cst.BaseExpression, scene: expressions.FixContext, around: cst.CSTNode
) -> KeptCalls | None:
    """A new expression that calls nothing more or less often than the old one; None where there is none.

    `log(p)` of `p = sigmoid(self.head(x))` would run the head again: a name takes its result.

    Args:
        old: What stands there.
        new: What shall stand there.
        scene: What local names were made from.
        around: The function around it, or the module.
    """
    wanted = count_calls(old, scene.names)
    if count_calls(new, scene.names) == wanted:
        return KeptCalls(new)
    for name, value in scene.made.items():
        if not count_calls(value, scene.names):
            continue
        fresh = cst.Name(f"{name}_input")
        for part in m.findall(value, m.MatchIfTrue(lambda one: isinstance(one, cst.BaseExpression))):
            if part is value or not isinstance(part, cst.BaseExpression) or not count_calls(part, scene.names):
                continue
            inner = new.visit(_Swap(part, fresh))
            if not isinstance(inner, cst.BaseExpression) or count_calls(inner, scene.names) != wanted:
                continue
            line = next((one for one in find_path(around, value) if isinstance(one, cst.SimpleStatementLine)), None)
            if line is None or len(line.body) != 1 or m.findall(around, m.Name(fresh.value)):
                return None
            code = cst.Module([]).code_for_node
            made = line.body[0].visit(_Swap(part, fresh))
            if not isinstance(made, cst.BaseSmallStatement):
                return None
            spelled = f"({code(part)})" if "\n" in code(part) else code(part)
            statements = (f"{fresh.value} = {spelled}", code(made))
            return KeptCalls(inner, line, NewStatements(statements, "what is computed once has a name"))
    return None


class _Swap(cst.CSTTransformer):
    """Replaces an expression by a name, wherever it is written."""

    def __init__(self, old: cst.BaseExpression, new: cst.Name) -> None:
        super().__init__()
        self._old, self._new = old, new

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode):  # pyright: ignore
        """Where it is written so."""
        is_old = isinstance(original_node, cst.BaseExpression) and same(original_node, self._old)
        return self._new if is_old else updated_node


def _fits(kept: KeptCalls, nodes: Mapping[cst.CSTNode, object], lines: Mapping[cst.CSTNode, NewStatements]) -> bool:
    """Whether the statement that is changed as well has no other change; the next pass sees it."""
    if kept.line is None:
        return True
    if kept.line in lines:
        return lines[kept.line] == kept.bound
    return not any(find_path(kept.line, node) for node in nodes)


def _key(place: NodePlace) -> tuple[int, int, int, int]:
    return place.line, place.column - 1, place.end_line, place.end_column - 1


def _expressions_at(
    positions: Mapping[cst.CSTNode, CodeRange], wanted: set[tuple[int, int, int, int]]
) -> dict[tuple[int, int, int, int], list[cst.BaseExpression]]:
    found: dict[tuple[int, int, int, int], list[cst.BaseExpression]] = {}
    for node, where in positions.items():
        if not isinstance(node, cst.BaseExpression):
            continue
        key = where.start.line, where.start.column, where.end.line, where.end.column
        if key in wanted:
            found.setdefault(key, []).append(node)
    return found


def _in_same_parentheses(old: cst.BaseExpression, new: cst.BaseExpression) -> cst.BaseExpression:
    if not getattr(old, "lpar", ()) or getattr(new, "lpar", ()) or isinstance(new, cst.Call):
        return new
    return new.with_changes(lpar=old.lpar, rpar=old.rpar)


class Put(cst.CSTTransformer):
    """Replaces the old nodes by the new ones, the outermost first."""

    def __init__(self, nodes: dict[cst.CSTNode, cst.BaseExpression], lines: dict[cst.CSTNode, NewStatements]) -> None:
        super().__init__()
        self._nodes, self._lines = nodes, lines

    def on_visit(self, node: cst.CSTNode) -> bool:
        """What is exchanged is not looked into."""
        return node not in self._nodes and node not in self._lines

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode):  # pyright: ignore
        """Put in what was found."""
        if original_node in self._lines and isinstance(updated_node, cst.SimpleStatementLine):
            return exchange(updated_node, self._lines[original_node])
        return self._nodes.get(original_node, updated_node)


def exchange(line: cst.SimpleStatementLine, new: NewStatements) -> cst.FlattenSentinel[cst.BaseStatement]:
    """Other statements instead of one, with its comments."""
    lines = [cst.parse_statement(text) for text in new.statements]
    lines[0] = lines[0].with_changes(leading_lines=line.leading_lines)
    lines[-1] = _with_comment(lines[-1], line.trailing_whitespace)
    return cst.FlattenSentinel(lines)


def _with_comment(statement: _Statement, comment: cst.TrailingWhitespace) -> _Statement:
    """A statement with the comment at the end of its last line."""
    if isinstance(statement, cst.SimpleStatementLine):
        return statement.with_changes(trailing_whitespace=comment)
    if not isinstance(statement, (cst.With, cst.If)) or not isinstance(statement.body, cst.IndentedBlock):
        return statement
    inner = statement.body.body
    last = _with_comment(cst.ensure_type(inner[-1], cst.SimpleStatementLine), comment)
    return statement.with_changes(body=statement.body.with_changes(body=[*inner[:-1], last]))


class Replace(cst.CSTVisitor):
    """Finds rewrites for the expressions of one statement, the outermost first.

    Attributes:
        nodes: The old expressions and the new ones.
        lines: Statements that change with them.
        says: What is done, as one line each.
        safe: Whether it is the same function in exact arithmetic.
    """

    def __init__(self, rewrite: expressions.Rewrite, scene: expressions.FixContext, around: cst.CSTNode) -> None:
        super().__init__()
        self._rewrite, self._scene, self._around = rewrite, scene, around
        self.nodes: dict[cst.CSTNode, cst.BaseExpression] = {}
        self.lines: dict[cst.CSTNode, NewStatements] = {}
        self.says: list[str] = []
        self.safe = True

    def on_visit(self, node: cst.CSTNode) -> bool:
        """What is replaced is not looked into."""
        change = self._rewrite(node, self._scene) if isinstance(node, cst.BaseExpression) else None
        if change is None or not isinstance(node, cst.BaseExpression):
            return True
        kept = keep_calls(node, change.node, self._scene, self._around)
        if kept is None or not _fits(kept, self.nodes, self.lines):
            return True
        self.lines.update({} if kept.line is None or kept.bound is None else {kept.line: kept.bound})
        self.nodes[node] = _in_same_parentheses(node, kept.node)
        self.says.append(change.says)
        self.safe = self.safe and change.safe
        return False


class Exchange(cst.CSTTransformer):
    """Replaces one statement by others."""

    def __init__(self, line: cst.SimpleStatementLine, new: NewStatements) -> None:
        super().__init__()
        self._line, self._new = line, new

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        """Exchange it."""
        if self._new.earlier is not None and original_node is self._new.earlier[0]:
            first = cst.parse_statement(self._new.earlier[1]).with_changes(leading_lines=updated_node.leading_lines)
            return cst.FlattenSentinel([first, updated_node.with_changes(leading_lines=())])
        if original_node is not self._line:
            return updated_node
        return exchange(updated_node, self._new)
