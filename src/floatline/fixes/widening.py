"""Expressions in FP32: `.float()` at the tensors that they begin with, and at no number."""

from __future__ import annotations

import libcst as cst

from floatline.fixes.names import Names
from floatline.fixes.operations import float_of, read_number, read_operation

# Operations that can be computed in FP32 by widening their first operand.
WIDENED = frozenset(
    """sum mean pow mul div sub add exp expm1 log log1p log2 sqrt rsqrt reciprocal norm var std prod cumsum logsumexp
    softmax log_softmax acos asin atanh acosh slogdet det inverse cdist sigmoid tanh abs neg clamp clamp_min clamp_max
    cosh sinh matmul var_mean std_mean""".split()  # noqa: SIM905
)


def widen_tree(node: cst.BaseExpression, names: Names) -> cst.BaseExpression | None:
    """An expression with its tensors widened to FP32 where they enter; None where they are FP32 already.

    Of two operands one is enough, and then the other may be a number: a product of FP32 and 16 bits is FP32. Only a
    matrix product needs both.

    Args:
        node: An operation, or what one is applied to.
        names: The file's imports.
    """
    if read_number(node) is not None:
        return None
    if isinstance(node, cst.UnaryOperation):
        inner = widen_tree(node.expression, names)
        return None if inner is None else node.with_changes(expression=inner)
    found = read_operation(node, names)
    if isinstance(node, cst.BinaryOperation):
        return _widen_sides(node, names)
    if found is None or not isinstance(node, cst.Call) or found.name not in WIDENED:
        wide = float_of(node, names)
        return None if wide is node else wide
    inner = widen_tree(found.operand, names)
    if inner is None:
        return None
    if found.is_method:
        function = cst.ensure_type(node.func, cst.Attribute)
        return node.with_changes(func=function.with_changes(value=inner))
    return node.with_changes(args=[node.args[0].with_changes(value=inner), *node.args[1:]])


def _widen_sides(node: cst.BinaryOperation, names: Names) -> cst.BaseExpression | None:
    sides = (node.left, node.right)
    computed = [_is_computed(side, names) for side in sides]
    # What is computed here may be too large by itself. Of two plain names one is widened: a local rather than an
    # attribute, which is a setting more often than a tensor.
    chosen = list(computed)
    if isinstance(node.operator, cst.MatrixMultiply):
        chosen = [True, True]
    elif not any(computed):
        ranks = [(0 if read_number(s) is not None else 1 if isinstance(s, cst.Attribute) else 2) for s in sides]
        chosen = [ranks[0] >= ranks[1], ranks[0] < ranks[1]]
    new = [widen_tree(side, names) if wanted else None for side, wanted in zip(sides, chosen, strict=True)]
    if new == [None, None]:
        return None
    return node.with_changes(left=new[0] or node.left, right=new[1] or node.right)


def _is_computed(node: cst.BaseExpression, names: Names) -> bool:
    if isinstance(node, cst.UnaryOperation):
        return _is_computed(node.expression, names)
    return read_number(node) is None and isinstance(node, (cst.BinaryOperation, cst.Call, cst.Subscript))
