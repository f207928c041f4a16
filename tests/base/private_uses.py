"""Finds every private name of another package that a source touches, by reading it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Own:
    """What the classes of a package define, by class name; and the names of their bases."""

    defined: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, set[str]] = field(default_factory=dict)

    def has(self, owner: str, name: str) -> bool:
        """Whether the class or one of its bases in the package defines the name."""
        todo, seen = [owner], set()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            if name in self.defined.get(one, ()):
                return True
            todo += self.bases.get(one, ())
        return False


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_classes(trees: dict[str, ast.Module]) -> Own:
    own = Own()
    for node in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        defined = own.defined.setdefault(node.name, set())
        own.bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in node.bases)
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                defined.add(inner.name)
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _is_self(inner.value):
                defined.add(inner.attr)
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                defined.add(inner.id)
    return own


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_uses(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Private names that are not the package's own, each with the modules that touch it.

    An imported name is dotted, as it is imported; an attribute is its last word: whose it is cannot be read.
    """
    own, found = own_classes(trees), {}

    def add(name: str, module: str) -> None:
        found.setdefault(name, set()).add(module)

    for module, tree in trees.items():
        for node, owner in _with_class(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                if not (_is_self(node.value) and owner is not None and own.has(owner, node.attr)):
                    add(node.attr, module)
                continue
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
                word = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
                if is_private(word):
                    add(word, module)
                continue
            else:
                continue
            for name in names:
                if not name.startswith("floatline") and any(map(is_private, name.split("."))):
                    add(name, module)
    return found


def _with_class(tree: ast.Module) -> list[tuple[ast.AST, str | None]]:
    """Every node, with the innermost class that it stands in."""
    found: list[tuple[ast.AST, str | None]] = []
    todo: list[tuple[ast.AST, str | None]] = [(tree, None)]
    while todo:
        node, owner = todo.pop()
        found.append((node, owner))
        inner = node.name if isinstance(node, ast.ClassDef) else owner
        todo += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found


def parse(root: Path) -> dict[str, ast.Module]:
    return {str(path.relative_to(root)): ast.parse(path.read_text("utf-8")) for path in sorted(root.rglob("*.py"))}
