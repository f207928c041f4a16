"""SourceTree: a Python file, parsed: what stands where, what its names mean, and which operation of torch a node is."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from floatline.lint.reading.neighbours import LintedTree

_HOMES = ("torch.nn.functional.", "torch.special.", "torch.linalg.", "torch.fft.", "torch.Tensor.", "torch.")
_ALIASES = {
    "expit": "sigmoid",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "clip": "clamp",
    "arccos": "acos",
    "arcsin": "asin",
}
_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
# Methods that arrays of numpy, frames of pandas and numbers have too: on an unknown object they say nothing of torch.
_SHARED_METHODS = frozenset(
    """all any argmax argmin astype clip conj copy cumprod cumsum diagonal dot fill flatten item max mean min nonzero
    prod ravel repeat reshape resize round sort squeeze std sum swapaxes take trace transpose var view tolist diff
    add sub mul div add_ index_select get set update step scale zero_grad backward size dim type to apply map where
    float int bool half""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Operation:
    """One operation of torch, however it is written.

    Args:
        name: As torch calls it, such as 'softmax'; in-place forms without their underscore.
        operand: What it is applied to.
        args: The other positional arguments.
        keywords: The arguments with a name.
        node: The whole expression.
        is_method: Whether it is written as a method of its operand.
        is_in_place: Whether it writes to its operand.
    """

    name: str
    operand: ast.expr
    args: tuple[ast.expr, ...]
    keywords: dict[str, ast.expr]
    node: ast.expr
    is_method: bool = False
    is_in_place: bool = False

    def argument(self, place: int, name: str) -> ast.expr | None:
        """An argument by its place after the operand, or by its name."""
        if name in self.keywords:
            return self.keywords[name]
        return self.args[place] if place < len(self.args) else None


class SourceTree(ABC):
    """A Python file, parsed.

    Args:
        text: The file.
        file: Its name, for findings.
        neighbours: The other files of its tree; None where nothing is known of them.

    Raises:
        SyntaxError: It is not Python.
    """

    def __init__(self, text: str, file: str = "example.py", *, neighbours: LintedTree | None = None) -> None:
        self.text, self.file, self.neighbours = text, file, neighbours
        self.tree = ast.parse(text)
        self.lines = text.split("\n")
        self.aliases = _read_imports(self.tree)
        self.answers: dict[object, dict[object, Any]] = {}  # of each function that asks, by its arguments

    def line(self, number: int) -> str:
        """A line without the space around it."""
        return self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""

    def column(self, line: int, offset: int) -> int:
        """A column for people, from the bytes that `ast` counts."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return (offset if text.isascii() else len(text.encode()[:offset].decode(errors="replace"))) + 1

    def code(self, node: ast.AST) -> str:
        """A node as source, on one line."""
        return " ".join((ast.get_source_segment(self.text, node) or "").split())

    # What names mean.

    def path(self, node: ast.AST) -> str:
        """What a name or attribute stands for by the file's imports: torch.nn.functional.softmax; or ''."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = self.path(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def call_name(self, node: ast.Call) -> str:
        """The last name of what is called, by the file's imports; '' where it has none."""
        function = node.func
        if isinstance(function, ast.Attribute):
            return function.attr
        if isinstance(function, ast.Name):
            return self.aliases.get(function.id, function.id).rpartition(".")[2]
        return ""

    def is_call_to(self, node: ast.AST | None, *paths: str) -> bool:
        """Whether a node calls one of these dotted paths."""
        return isinstance(node, ast.Call) and self.path(node.func) in paths

    def operation(self, node: ast.AST | None) -> Operation | None:
        """The operation of torch that an expression is; None where it is none, or cannot be told.

        A sign (`x + 1e-8`) is one too. A method counts where only tensors have it, or where its owner is known to be a
        tensor: `x.sum()` of an unknown x may be numpy's.
        """
        if isinstance(node, ast.BinOp):
            name = _SIGNS.get(type(node.op), "")
            return Operation(name, node.left, (node.right,), {}, node) if name else None
        if not isinstance(node, ast.Call) or any(isinstance(arg, ast.Starred) for arg in node.args):
            return None
        keywords = {word.arg: word.value for word in node.keywords if word.arg}
        path = self.path(node.func)
        if path:
            home = next((home for home in _HOMES if path.startswith(home)), "")
            name = path.removeprefix(home)
            first = node.args[0] if node.args else keywords.get("input")
            if not home or "." in name or first is None:
                return None
            return make_operation(name, first, node.args[1:], keywords, node, is_method=False)
        if not isinstance(node.func, ast.Attribute):
            return None
        name, owner = node.func.attr, node.func.value
        if self.path(owner) or (name in _SHARED_METHODS and not self.is_tensor(owner)):
            return None
        return make_operation(name, owner, node.args, keywords, node, is_method=True)

    @abstractmethod
    def is_tensor(self, node: ast.expr) -> bool:
        """Whether the file shows that this is a tensor: made by torch, annotated so, or used as only tensors are."""

    # Where a node stands.

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        found: dict[ast.AST, ast.AST] = {}
        waiting: list[ast.AST] = [self.tree]
        while waiting:  # by hand: `ast.walk` takes twice as long, and every file pays for it
            node = waiting.pop()
            for field in node._fields:
                child = getattr(node, field, None)
                if isinstance(child, ast.AST):
                    found[child] = node
                    waiting.append(child)
                elif isinstance(child, list):
                    inner = [one for one in child if isinstance(one, ast.AST)]  # pyright: ignore
                    found.update(dict.fromkeys(inner, node))
                    waiting.extend(inner)
        return found

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, the innermost first."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module:
        """The innermost function around a node, or the module."""
        for above in self.ancestors(node):
            if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                return above
        return self.tree

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The innermost statement around a node, or the node itself where it is one."""
        if isinstance(node, ast.stmt):
            return node
        return next((above for above in self.ancestors(node) if isinstance(above, ast.stmt)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class around a node."""
        return next((above for above in self.ancestors(node) if isinstance(above, ast.ClassDef)), None)

    def is_module_class(self, node: ast.ClassDef | None) -> bool:
        """Whether a class is a torch module by its bases: nn.Module, or a class of this file that is one."""
        if node is None:
            return False
        for base in node.bases:
            path = self.path(base)
            if path.endswith((".Module", ".LightningModule", "PreTrainedModel", ".ModuleList", ".Sequential")):
                return True
            own = self.classes.get(base.id) if isinstance(base, ast.Name) else None
            if own is not node and self.is_module_class(own):
                return True
        return False

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """What `from … import …` at the top of the file names: the module, with its dots, and the name in it."""
        return {
            alias.asname or alias.name: ("." * node.level + (node.module or ""), alias.name)
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes of the file."""
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    @cached_property
    def calls(self) -> dict[str, list[ast.Call]]:
        """The calls of the file by the last name of what is called."""
        found: dict[str, list[ast.Call]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and (name := self.call_name(node)):
                found.setdefault(name, []).append(node)
        return found


_S = TypeVar("_S", bound=SourceTree)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def read_once(read: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """A function of a file whose answers are kept with the file: many rules ask the same."""

    @wraps(read)
    def ask(source: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        answers = source.answers.setdefault(read, {})
        if args not in answers:
            answers[args] = read(source, *args, **kwargs)
        return answers[args]

    return ask


def make_operation(
    name: str,
    operand: ast.expr,
    args: Sequence[ast.expr],
    keywords: dict[str, ast.expr],
    node: ast.Call,
    *,
    is_method: bool,
) -> Operation:
    """The operation of a call by the name that it has in the source."""
    plain = name.rstrip("_") if not name.startswith("_") else name
    return Operation(
        _ALIASES.get(plain, plain), operand, tuple(args), keywords, node, is_method, is_in_place=plain != name
    )


def last_name(node: ast.AST) -> str:
    """`step` of `self.optimizer.step` and of `step`; '' for anything but names and attributes."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The argument that a call gives by this name."""
    return next((word.value for word in call.keywords if word.arg == name), None)


def given_dtypes(call: ast.Call) -> list[ast.expr]:
    """The arguments of a call that may be a dtype: those by place, and those by its names."""
    return [*call.args, *(word.value for word in call.keywords if word.arg in ("dtype", "torch_dtype"))]


def parameters(function: ast.AST, *, only_by_place: bool = False) -> list[str]:
    """The names of a function's parameters, without `*args` and `**kwargs`."""
    arguments = getattr(function, "args", None)
    if not isinstance(arguments, ast.arguments):
        return []
    by_name = () if only_by_place else arguments.kwonlyargs
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *by_name)]


def _read_imports(tree: ast.Module) -> dict[str, str]:
    """Local names to the dotted paths that they stand for, wherever the imports are."""
    aliases: dict[str, str] = {}
    waiting: list[Sequence[ast.stmt]] = [tree.body]
    while waiting:
        for node in waiting.pop():
            if isinstance(node, ast.Import):
                for alias in node.names:
                    aliases[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                if node.module and not node.level:
                    for alias in node.names:
                        aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            else:
                waiting.extend(getattr(node, block, ()) for block in ("body", "orelse", "finalbody"))
                waiting.extend(handler.body for handler in getattr(node, "handlers", ()))
    return aliases
