"""Values that a guard against 0 is not needed for: they are not exactly 0, or another file makes them."""

from __future__ import annotations

import ast

from floatline.lint.reading.reaching import owned_values
from floatline.lint.reading.silence import made_of
from floatline.lint.reading.source import Source
from floatline.lint.reading.tensors import SHAPES

_DEPTH = 8
_DRAWS = frozenset(("normal", "normal_", "randn", "randn_like"))
_PARAMETERS = ("torch.nn.Parameter", "torch.nn.parameter.Parameter", "torch.nn.ParameterDict", "torch.nn.ParameterList")
_START_AT_ZERO = frozenset(("zeros", "zeros_like", "empty", "empty_like", "new_zeros", "new_empty", "Tensor"))


def is_drawn(source: Source, node: ast.expr) -> bool:
    """Whether a value is drawn from a normal distribution: a row of it is not zero."""
    made = source.value(node)
    return isinstance(made, ast.Call) and source.call_name(made) in _DRAWS


def is_learned_scale(source: Source, node: ast.expr) -> bool:
    """Whether a value is a learned parameter itself, or its exp.

    Training does not land on 0 exactly, unless it starts there; and where exp rounds to 0, its inverse is inf long
    before. The square or the norm of a parameter is another matter.
    """
    is_exp = False
    for _ in range(_DEPTH):
        node = source.value(node)
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in ("data", "T")):
            node = node.value
        elif isinstance(node, ast.Call):
            is_exp |= source.call_name(node) == "exp"
            inner = _inner(source, node)
            if inner is None:
                return False
            node = inner
    made = [one for one in owned_values(source, node) if source.is_call_to(one, *_PARAMETERS)]
    return bool(made) and (is_exp or not any(_starts_at_zero(source, one) for one in made))


def _inner(source: Source, node: ast.Call) -> ast.expr | None:
    """x of x.view(1, -1), x.exp(), torch.exp(x) and of `self._shaped(x)`; None where more happens to it."""
    if source.path(node.func):
        return node.args[0] if source.path(node.func) == "torch.exp" and node.args else None
    if not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr in SHAPES or node.func.attr in ("exp", "detach"):
        return node.func.value
    is_own = isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
    return node.args[0] if is_own and len(node.args) == 1 and not node.keywords else None


def _starts_at_zero(source: Source, made: ast.expr) -> bool:
    return any(isinstance(one, ast.Call) and source.call_name(one) in _START_AT_ZERO for one in ast.walk(made))


def is_of_other_file(source: Source, node: ast.expr) -> bool:
    """Whether a value comes out of a method of an object whose class is another file's: its dtype is not shown here."""
    for one in made_of(source, node):
        if not isinstance(one, ast.Call) or not isinstance(one.func, ast.Attribute):
            continue
        owner = one.func.value
        while isinstance(owner, ast.Subscript):
            owner = owner.value
        if isinstance(owner, ast.Name) and _is_foreign(source, source.value(owner)):
            return True
    return False


def _is_foreign(source: Source, made: ast.expr) -> bool:
    """`Frame(…)` and `Frame.from_points(…)` of an imported class that is not torch's."""
    if not isinstance(made, ast.Call):
        return False
    maker = made.func.value if isinstance(made.func, ast.Attribute) else made.func
    if not isinstance(maker, ast.Name) or not maker.id[:1].isupper() or maker.id in source.classes:
        return False
    return not source.path(maker).startswith("torch.")
