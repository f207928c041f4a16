"""Sums, norms and variances that lose their value in 16 bits, and the same in a form that does not."""

from __future__ import annotations

import libcst as cst

from floatline.fixes.expressions import FixContext, NewExpression
from floatline.fixes.operations import SourceOperation, bare, call, method, read_number, same

_SUMS = ("sum", "prod", "cumsum", "cumprod")


def vector_norm(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """sqrt(sum(x ** 2, dim)) to torch.linalg.vector_norm(x, dim=dim)."""
    outer, new = scene.read(node), scene.names.spell("torch.linalg.vector_norm")
    if outer is None or new is None or outer.name not in ("sqrt", "pow"):
        return None
    if outer.name == "sqrt" and outer.rest:
        return None
    if outer.name == "pow" and (len(outer.rest) != 1 or read_number(outer.rest[0].value) != 0.5):
        return None
    inner = scene.read(outer.operand)
    squared = _squared(inner.operand, scene) if inner is not None and inner.name == "sum" else None
    options = None if inner is None else _options(inner)
    if squared is None or options is None:
        return None
    return NewExpression(
        call(new, squared, rest=options), "the root of a sum of squares is a norm, whose gradient at 0 is 0"
    )


def two_pass_variance(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """mean(x ** 2, dim) - mean(x, dim) ** 2 to x.var(dim, unbiased=False)."""
    outer = scene.read(node)
    if outer is None or outer.name != "sub" or len(outer.rest) != 1:
        return None
    large, mean = scene.read(outer.operand), _squared(outer.rest[0].value, scene)
    small = None if mean is None else scene.read(mean)
    if large is None or small is None or large.name != "mean" or small.name != "mean":
        return None
    x, options = _squared(large.operand, scene), _options(large)
    others = _options(small)
    if x is None or options is None or others is None or not same(x, small.operand):
        return None
    written = [[cst.Module([]).code_for_node(_plain(arg)) for arg in part] for part in (options, others)]
    if written[0] != written[1]:
        return None
    biased = _keyword("unbiased", cst.Name("False"))
    return NewExpression(
        method(bare(x), "var", *options, biased), "the variance is computed from what is left without the mean"
    )


def sum_dtype(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """sum(x) to sum(x, dtype=torch.float32)."""
    found, dtype = scene.read(node), scene.names.spell("torch.float32")
    if found is None or dtype is None or found.name not in _SUMS or not isinstance(node, cst.Call):
        return None
    if any(arg.keyword is not None and arg.keyword.value == "dtype" for arg in node.args):
        return None
    args = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in node.args]
    return NewExpression(node.with_changes(args=[*args, _keyword("dtype", dtype)]), f"{found.name} is kept in FP32")


def _squared(node: cst.BaseExpression, scene: FixContext) -> cst.BaseExpression | None:
    """x of x ** 2, x * x, x.pow(2) and torch.square(x)."""
    found = scene.read(node)
    if found is None:
        return None
    if found.name == "mul" and len(found.rest) == 1:
        return found.operand if same(found.operand, found.rest[0].value) else None
    if found.name != "pow":
        return None
    if not found.rest:  # square
        return found.operand
    return found.operand if len(found.rest) == 1 and read_number(found.rest[0].value) == 2.0 else None


def _options(found: SourceOperation) -> list[cst.Arg] | None:
    """dim and keepdim of a reduction, each by its name; None where it has others."""
    names = ["dim", "keepdim"]
    options: list[cst.Arg] = []
    for arg in found.rest:
        if arg.star:
            return None
        name = names[0] if arg.keyword is None and names else arg.keyword.value if arg.keyword is not None else ""
        if name not in names:
            return None
        names = names[names.index(name) + 1 :]
        options.append(_keyword(name, arg.value))
    return options


def _keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    bound = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(value, cst.Name(name), equal=bound)


def _plain(arg: cst.Arg) -> cst.Arg:
    return arg.with_changes(comma=cst.MaybeSentinel.DEFAULT)
