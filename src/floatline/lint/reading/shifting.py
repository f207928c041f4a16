"""exp in source code: what it is taken of, and whether that has a bound."""

from __future__ import annotations

import ast

from floatline.lint.reading.source import Source

_BOUNDS = frozenset(("max", "amax", "logsumexp", "log_softmax", "logsigmoid", "clamp", "clamp_max", "minimum", "min"))
_EVEN = frozenset(("abs", "square", "cdist", "norm", "relu", "softplus", "exp"))


def read_exp(source: Source, node: ast.expr) -> ast.expr | None:
    """What exp is taken of, where an expression, or what its name was made from, is one; else None."""
    found = source.operation(source.value(node))
    return found.operand if found is not None and found.name == "exp" and not found.args else None


def is_bounded(source: Source, node: ast.expr, *, depth: int = 0) -> bool:
    """Whether the file shows a bound above: a value shifted by its maximum, clamped, or minus a square."""
    node = source.value(node)
    if depth > 4:
        return False
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_positive(source, node.operand)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Sub):
            return _mentions_bound(source, node.right, depth=depth)
        if isinstance(node.op, (ast.Mult, ast.Div)):
            sides = (node.left, node.right)
            return any(is_bounded(source, side, depth=depth + 1) for side in sides) or any(
                isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.USub) and _is_positive(source, other)
                for one, other in (sides, sides[::-1])
            )
        return False
    if isinstance(node, ast.Subscript):
        return is_bounded(source, node.value, depth=depth + 1)
    found = source.operation(node)
    return found is not None and found.name in _BOUNDS


def _is_positive(source: Source, node: ast.expr) -> bool:
    node = source.value(node)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):
            return source.number(node.right) in (2, 4)
        return isinstance(node.op, (ast.Mult, ast.Div)) and any(
            _is_positive(source, s) for s in (node.left, node.right)
        )
    found = source.operation(node)
    if found is None:
        return False
    return found.name in _EVEN or (found.name == "pow" and bool(found.args) and source.number(found.args[0]) in (2, 4))


def _mentions_bound(source: Source, node: ast.expr, *, depth: int) -> bool:
    """Whether a maximum is what is taken away: `x.max(-1, keepdim=True)[0]`, or a name made from one."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and source.call_name(one) in _BOUNDS:
            return True
        if isinstance(one, ast.Name) and depth < 3:
            made = source.value(one)
            if made is not one and _mentions_bound(source, made, depth=depth + 1):
                return True
            if "max" in one.id.lower():  # given from elsewhere, or unpacked: `x_max, _ = x.max(-1)`
                return True
    return False


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
