"""Tests that ask whether something is finite."""

from __future__ import annotations

import ast

from floatline.lint.source import Source

_ASKS = frozenset(("isfinite", "isnan", "isinf"))
_DEPTH = 4


def asks_for_finite(source: Source, node: ast.AST, *, depth: int = 0) -> bool:
    """Whether an expression asks isfinite, isnan or isinf, by itself or by what its names were made from."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and source.call_name(one) in _ASKS:
            return True
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and depth < _DEPTH:
            made = source.value(one)
            if made is not one and asks_for_finite(source, made, depth=depth + 1):
                return True
    return False
