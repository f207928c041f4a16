"""Classes of modules that a file only ever runs in FP32."""

from __future__ import annotations

import ast

from floatline.lint.source import Source

_CASTS = frozenset(("float", "double"))


def is_in_cast_module(source: Source, node: ast.AST) -> bool:
    """Whether a node stands in a module that the file casts to FP32, or in one that only such modules are made of."""
    if ".float()" not in source.text and ".double()" not in source.text:
        return False
    owner = source.class_of(node)
    return owner is not None and owner.name in _cast_classes(source)


def _cast_classes(source: Source) -> frozenset[str]:
    known: frozenset[str] | None = source.__dict__.get("_cast_classes")
    if known is None:
        known = source.__dict__["_cast_classes"] = _find_cast_classes(source)
    return known


def _find_cast_classes(source: Source) -> frozenset[str]:
    roots = {name for owner in source.classes.values() for name in _cast_in(source, owner)}
    if not roots:
        return frozenset()
    made_by = {name: _made_in(source, owner) for name, owner in source.classes.items()}
    found, waiting = set[str](), list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += made_by.get(name, ())
    # What another module is made of as well runs in the dtype of that one, too.
    while shared := {name for user, names in made_by.items() if user not in found for name in names & (found - roots)}:
        found -= shared
    return frozenset(found)


def _cast_in(source: Source, owner: ast.ClassDef) -> set[str]:
    """Classes of what a bare `self.name.float()` casts: a module is cast in place, a tensor is not."""
    attributes = {
        node.value.func.value.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in _CASTS
        and isinstance(node.value.func.value, ast.Attribute)
        and isinstance(node.value.func.value.value, ast.Name)
    }
    if not attributes:
        return set()
    return {
        name
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Attribute) and target.attr in attributes for target in node.targets)
        and (name := _class_made(source, node.value))
    }


def _made_in(source: Source, owner: ast.ClassDef) -> set[str]:
    return {name for node in ast.walk(owner) if (name := _class_made(source, node))}


def _class_made(source: Source, node: ast.AST) -> str:
    """Part of `Part(…)` and of `Part.from_config(…)`, where Part is a class of the file."""
    if not isinstance(node, ast.Call):
        return ""
    made = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    return made.id if isinstance(made, ast.Name) and made.id in source.classes else ""
