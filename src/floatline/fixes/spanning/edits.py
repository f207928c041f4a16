"""A change of several statements of one file: what it is made from, and how it is written into the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m

from floatline.fixes.expressions import FixContext
from floatline.fixes.scope import find_path
from floatline.fixes.statements import source_of

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
LOOPS = (cst.For, cst.While)


@dataclass(frozen=True)
class FileScene:
    """A statement and everything around it.

    Args:
        module: The file.
        line: The statement that a finding names.
        around: The innermost function around it, or the module.
        context: Imports, names and the operation that failed.
    """

    module: cst.Module
    line: cst.SimpleStatementLine
    around: cst.CSTNode
    context: FixContext

    def path_to(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """The nodes from the innermost function down to one of its nodes."""
        return find_path(self.around, node)

    def find_class(self) -> cst.ClassDef | None:
        """The innermost class around the statement."""
        path = find_path(self.module, self.line)
        return next((node for node in reversed(path) if isinstance(node, cst.ClassDef)), None)

    def is_before(self, first: cst.CSTNode, second: cst.CSTNode) -> bool:
        """Whether a node of the file begins before another one does."""
        paths = zip(find_path(self.module, first), find_path(self.module, second), strict=False)
        parent: cst.CSTNode = self.module
        for left, right in paths:
            if left is not right:
                return _index(parent, left) < _index(parent, right)
            parent = left
        return False


@dataclass(frozen=True)
class FileEdit:
    """Changes of the nodes of a file, made together.

    Args:
        says: What was done, as one line.
        nodes: Nodes to what stands there instead; several statements for one, or none at all.
        before: Statements to what is put before them.
        after: Statements to what is put behind them.
        safe: Whether the changed file is the same function in exact arithmetic.
    """

    says: str
    nodes: Mapping[cst.CSTNode, cst.CSTNode | Sequence[Statement]] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    before: Mapping[cst.CSTNode, Sequence[Statement]] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    after: Mapping[cst.CSTNode, Sequence[Statement]] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    safe: bool = True

    def apply(self, module: cst.Module) -> str:
        """The file with the changes."""
        return cst.ensure_type(module.visit(_MakeEdits(self)), cst.Module).code


SpanRewrite = Callable[[FileScene], FileEdit | None]


class _MakeEdits(cst.CSTTransformer):
    def __init__(self, edit: FileEdit) -> None:
        super().__init__()
        self._edit = edit

    def on_visit(self, node: cst.CSTNode) -> bool:
        """What is exchanged is not looked into."""
        return node not in self._edit.nodes

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode):  # pyright: ignore
        """Put in what was found."""
        edit = self._edit
        before, after = edit.before.get(original_node, ()), edit.after.get(original_node, ())
        new = edit.nodes.get(original_node, updated_node)
        if isinstance(new, cst.CSTNode) and not before and not after:
            return new
        kept = [new] if isinstance(new, cst.CSTNode) else [*new]
        lines = [*before, *kept, *after]
        if not lines:
            return cst.RemoveFromParent()
        if before and isinstance(new, cst.CSTNode):  # comments above a statement stay above what is put before it
            lines = [with_lead(lines[0], lead_of(new)), *lines[1:]]
            lines[len(before)] = with_lead(new, ())
        return cst.FlattenSentinel(lines)


def lead_of(node: cst.CSTNode) -> Sequence[cst.EmptyLine]:
    """The blank lines and comments above a statement."""
    return getattr(node, "leading_lines", ())


def with_lead(node: cst.CSTNode, lines: Sequence[cst.EmptyLine]) -> cst.CSTNode:
    """A statement with other lines above it."""
    return node.with_changes(leading_lines=lines)


def _index(parent: cst.CSTNode, child: cst.CSTNode) -> int:
    return next(at for at, one in enumerate(parent.children) if one is child)


def statement(text: str) -> Statement:
    """A statement from its source."""
    return cst.parse_statement(text)


def calls_of(node: cst.CSTNode, name: str) -> list[cst.Call]:
    """Calls of a method or function by its last name, in the order of the source."""
    called = m.Call(m.Attribute(attr=m.Name(name)) | m.Name(name))
    return [cst.ensure_type(one, cst.Call) for one in m.findall(node, called)]


def owner_of(call: cst.Call) -> str:
    """`a.b` of `a.b.step()`; '' for a plain function."""
    return source_of(call.func.value) if isinstance(call.func, cst.Attribute) else ""


def own_statement(around: cst.CSTNode, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
    """The simple statement that a node stands in."""
    path = find_path(around, node)
    return next((one for one in reversed(path) if isinstance(one, cst.SimpleStatementLine)), None)


def block_of(around: cst.CSTNode, line: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The statements of the block that a statement stands in."""
    path = find_path(around, line)
    parent = path[-2] if len(path) > 1 else None
    return parent.body if isinstance(parent, (cst.IndentedBlock, cst.Module)) else ()


def names_in(node: cst.CSTNode) -> set[str]:
    """The names that stand in a node, without those behind a dot or of a keyword."""
    behind = [cst.ensure_type(one, cst.Attribute).attr for one in m.findall(node, m.Attribute())]
    words = [cst.ensure_type(one, cst.Arg).keyword for one in m.findall(node, m.Arg(keyword=m.Name()))]
    hidden = {id(one) for one in (*behind, *words)}
    return {cst.ensure_type(one, cst.Name).value for one in m.findall(node, m.Name()) if id(one) not in hidden}


def assigned_in(node: cst.CSTNode) -> set[str]:
    """The names, and attributes such as `self.x`, that statements of a node assign."""
    kinds = m.AssignTarget() | m.AugAssign() | m.AnnAssign() | m.For() | m.NamedExpr()
    found: list[Any] = [*m.findall(node, kinds)]
    return {source_of(part) for one in found for part in _parts(one.target)}


def _parts(target: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(target, (cst.Tuple, cst.List)):
        return [part for one in target.elements for part in _parts(one.value)]
    return [target.value] if isinstance(target, cst.Subscript) else [target]


def parameters_of(around: cst.CSTNode, *, with_defaults: bool = True) -> set[str]:
    """The names of a function's parameters, or of those that a caller must give."""
    if not isinstance(around, cst.FunctionDef):
        return set()
    every = [cst.ensure_type(one, cst.Param) for one in m.findall(around.params, m.Param())]
    return {one.name.value for one in every if with_defaults or one.default is None}


def keyword_of(call: cst.Call, word: str) -> str:
    """The source of a keyword argument; '' where it is not given."""
    given = [arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == word]
    return source_of(given[0]) if given else ""


def is_known_at(scene: FileScene, expression: str, line: cst.CSTNode) -> bool:
    """Whether the names of an expression mean at an earlier statement what they mean later."""
    names = names_in(cst.parse_expression(expression)) if expression else set[str]()
    lines = [one for one in m.findall(scene.around, m.SimpleStatementLine()) if assigned_in(one) & names]
    in_loops = {
        name for one in m.findall(scene.around, m.For()) for name in names_in(cst.ensure_type(one, cst.For).target)
    }
    return not in_loops & names and all(scene.is_before(one, line) for one in lines)
