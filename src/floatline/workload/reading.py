"""What a module defines, found by reading its source: a plain script is not run to learn that it is no target."""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
# No value of these is a function.
_DATA = (
    *(ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Compare, ast.UnaryOp),
    *(ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp),
)


def may_define(source: bytes, names: Iterable[str], *, given: Iterable[str] | None = None) -> bool:
    """Whether a module may have a function of one of these names, once it is imported.

    Definitions, imports and assignments count where they stand at module level, also in `if`, `try`, `with` and loops;
    not under `if __name__ == "__main__"`. So does what cannot be read: `from x import *`, `__getattr__`, writes into
    `globals()`, and names that a function makes global.

    Args:
        source: Of the module.
        names: Of functions.
        given: What the function will be called with: one that needs anything else does not count, unless a decorator
            may give it. None: whatever it needs.

    Raises:
        SyntaxError: The source is not Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler; they come again when the module is imported
        try:
            tree = ast.parse(source)
        except (RecursionError, MemoryError):
            return True
        except ValueError as error:  # null bytes, in older Pythons
            raise SyntaxError(str(error)) from None
    wanted = {*names, "*", "__getattr__"}
    known = None if given is None else frozenset(given)
    made_global = (node for node in ast.walk(tree) if isinstance(node, ast.Global))
    if any(isinstance(node, ast.Assign) and any(map(_writes_global, node.targets)) for node in ast.walk(tree)):
        return True
    return any(name in wanted for name in _defined(tree, known)) or any(wanted & {*node.names} for node in made_global)


def _writes_global(target: ast.expr) -> bool:
    """Whether it is `globals()[name]`, in a function that may run at import as well."""
    return isinstance(target, ast.Subscript) and ast.unparse(target.value) == "globals()"


def needs(source: bytes, name: str) -> list[str]:
    """What functions of this name at the source's module level need to be called with."""
    functions = [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [argument for function in functions if function.name == name for argument in _required(function)]


def _required(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    placed = [*arguments.posonlyargs, *arguments.args]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    without = [*placed[: len(placed) - len(arguments.defaults)], *(one for one, default in named if default is None)]
    return [one.arg for one in without]


def _defined(node: ast.AST, known: frozenset[str] | None) -> Iterator[str]:
    """Names that are defined in a node and the blocks in it."""
    for child in _children(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            anyhow = child.decorator_list or child.name == "__getattr__"
            if known is None or anyhow or known.issuperset(_required(child)):
                yield child.name
        elif isinstance(child, ast.ClassDef):
            yield child.name
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in child.names)
        elif isinstance(child, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            for target in targets:
                yield from _bound(target, child.value)
        if not isinstance(child, _SCOPES):
            yield from _defined(child, known)


def _children(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__"):
        return node.orelse  # what is imported is never __main__
    return ast.iter_child_nodes(node)


def _bound(target: ast.expr, value: ast.expr | None) -> Iterator[str]:
    """Names to which an assignment may bind a function."""
    if isinstance(target, ast.Name) and value is not None and not isinstance(value, _DATA):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        same = len(values) == len(target.elts) and not any(isinstance(one, ast.Starred) for one in values)
        for number, part in enumerate(target.elts):
            yield from _bound(part, values[number] if same else value if not isinstance(value, _DATA) else None)


def find_source(module: str) -> Path | None:
    """The file of a module, found without importing it or its parents; None where it is imported already, or no file.

    Args:
        module: Its dotted name, looked up on sys.path as it is now.
    """
    if module in sys.modules:
        return None
    importlib.invalidate_caches()
    path: list[str] | None = None
    name = ""
    spec: ModuleSpec | None = None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = _find_spec(name, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    file = Path(spec.origin) if spec is not None and spec.origin else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _find_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    """As importlib.util.find_spec, which would import the packages that a module lies in."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        found: ModuleSpec | None = find(name, path) if find is not None else None
        if found is not None:
            return found
    return None
