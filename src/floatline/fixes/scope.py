"""Where a line stands in a file: its statement, the function around it, and what local names were made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

Positions = Mapping[cst.CSTNode, Any]
_NO_GRADIENTS = ("no_grad", "inference_mode", "set_grad_enabled")


def find_positions(wrapper: MetadataWrapper) -> Mapping[cst.CSTNode, CodeRange]:
    """Lines and columns of every node.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile. libcst tidies up after it, and its own KeyError comes over it.
    """
    try:
        return wrapper.resolve(PositionProvider)
    except KeyError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            cause = cause.__context__
        raise


@dataclass(frozen=True)
class LinePlace:
    """A statement.

    Args:
        line: The statement.
        around: The innermost function around it, or the module.
    """

    line: cst.SimpleStatementLine
    around: cst.CSTNode


def find_statement(module: cst.Module, positions: Positions, line: int) -> LinePlace | None:
    """The simple statement that a line belongs to; None where there is none."""
    finder = _Find(positions, line)
    module.visit(finder)
    return finder.found


class _Find(cst.CSTVisitor):
    def __init__(self, positions: Positions, line: int) -> None:
        self._positions, self._line = positions, line
        self._around: list[cst.CSTNode] = []
        self.found: LinePlace | None = None

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        self._around.append(node)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802
        self._around.append(node)
        return self._holds(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:  # noqa: N802
        del original_node
        self._around.pop()

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:  # noqa: N802
        return self._holds(node)

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:  # noqa: N802
        if self._holds(node):
            self.found = LinePlace(node, self._around[-1])
        return False

    def _holds(self, node: cst.CSTNode) -> bool:
        where = self._positions[node]
        return where.start.line <= self._line <= where.end.line


def are_alternatives(around: cst.CSTNode, first: cst.CSTNode, second: cst.CSTNode) -> bool:
    """Whether two nodes stand in different branches of one `if`, so that only one of them runs."""
    paths = [find_path(around, node) for node in (first, second)]
    shared = [left for left, right in zip(*paths, strict=False) if left is right]
    return bool(shared) and isinstance(shared[-1], cst.If)


def find_path(root: cst.CSTNode, node: cst.CSTNode) -> list[cst.CSTNode]:
    """The nodes from a root down to one of its nodes, with both; empty where it is not there."""
    if root is node:
        return [root]
    for child in root.children:
        if below := find_path(child, node):
            return [root, *below]
    return []


def find_steps(place: LinePlace) -> list[LinePlace]:
    """The other statements of the same function that call `step`."""
    called = m.Call(m.Attribute(attr=m.Name("step")))
    lines = [cst.ensure_type(one, cst.SimpleStatementLine) for one in m.findall(place.around, m.SimpleStatementLine())]
    return [LinePlace(one, place.around) for one in lines if one is not place.line and m.findall(one, called)]


def find_sources(around: cst.CSTNode, line: cst.SimpleStatementLine) -> list[cst.SimpleStatementLine]:
    """The statements that make the names which a statement uses; for the name of a loop, what it runs over."""
    reader = _Sources()
    around.visit(reader)
    wanted = {name.value for name in _all_names(line)}
    wanted |= {name for target, names in reader.loops if target & wanted for name in names}
    return [one for one, names in reversed(reader.found) if one is not line and names & wanted]


class _Sources(cst.CSTVisitor):
    """Statements and the names that they assign; loops, with their names and what they run over."""

    def __init__(self) -> None:
        self.found: list[tuple[cst.SimpleStatementLine, set[str]]] = []
        self.loops: list[tuple[set[str], set[str]]] = []

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:  # noqa: N802
        for part in node.body:
            targets = [one.target for one in part.targets] if isinstance(part, cst.Assign) else []
            names = {name.value for target in targets for name in _all_names(target)} - {"self"}
            if names:
                self.found.append((node, names))

    def visit_For(self, node: cst.For) -> None:  # noqa: N802
        self.loops.append(({one.value for one in _all_names(node.target)}, {n.value for n in _all_names(node.iter)}))


def find_made(around: cst.CSTNode, positions: Positions, line: int) -> dict[str, cst.BaseExpression]:
    """What local names stand for at a line: those assigned once, from names that have not changed since.

    Not what is given to the function as well, and not what a region without gradients around it made.
    """
    reader = _Assignments(positions)
    around.visit(reader)
    given = _given_to(around)
    made: dict[str, cst.BaseExpression] = {}
    for name, found in reader.found.items():
        at, value = found[0]
        if len(found) != 1 or value is None or name in given:
            continue
        if any(first <= at <= last < line for first, last in reader.without_gradients):
            continue
        used = {node.value for node in _all_names(value)}
        later = [n for other in used for n, _ in reader.found.get(other, ()) if at <= n <= line]
        if at < line and not later:
            made[name] = value
    return made


def _given_to(around: cst.CSTNode) -> set[str]:
    params = m.findall(around.params, m.Param()) if isinstance(around, cst.FunctionDef) else ()
    return {cst.ensure_type(one, cst.Param).name.value for one in params}


class _Assignments(cst.CSTVisitor):
    """Every assignment to a name: its line, and its value where that is one expression.

    Attributes:
        found: By name.
        without_gradients: First and last lines of `with torch.no_grad():` and the like.
    """

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self.found: dict[str, list[tuple[int, cst.BaseExpression | None]]] = {}
        self.without_gradients: list[tuple[int, int]] = []

    def visit_With(self, node: cst.With) -> None:  # noqa: N802
        for item in node.items:
            if item.asname is not None:
                self._note(item.asname.name, None)
            if any(one.value in _NO_GRADIENTS for one in _all_names(item.item)):
                where = self._positions[node]
                self.without_gradients.append((where.start.line, where.end.line))

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        for target in node.targets:
            alone = node.value if isinstance(target.target, cst.Name) else None
            self._note(target.target, alone)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:  # noqa: N802
        self._note(node.target, None)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:  # noqa: N802
        self._note(node.target, node.value)

    def visit_For(self, node: cst.For) -> None:  # noqa: N802
        self._note(node.target, None)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:  # noqa: N802
        self._note(node.target, None)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        for arg in node.args:
            if arg.keyword is not None and arg.keyword.value == "out":
                self._note(arg.value, None)
        # x.clamp_(…) writes to x.
        if isinstance(node.func, cst.Attribute) and node.func.attr.value.endswith("_"):
            self._note(node.func.value, None)

    def _note(self, target: cst.BaseExpression, value: cst.BaseExpression | None) -> None:
        at = self._positions[target].start.line
        # p[0] = 1 writes to p.
        names = [target] if isinstance(target, cst.Name) else _all_names(target)
        for name in names:
            self.found.setdefault(name.value, []).append((at, value))


def _all_names(node: cst.CSTNode) -> list[cst.Name]:
    reader = _Names()
    node.visit(reader)
    return reader.found


class _Names(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.Name] = []

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        self.found.append(node)
