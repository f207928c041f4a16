"""What guards lines: roots of 0, rows that are masked everywhere, means of nothing, clamped losses, an eps."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from floatline.fixes.expressions import FixContext, NewExpression
from floatline.fixes.operations import SourceOperation, call, enclosed, is_simple, method, read_number, read_operation

_CLAMPS = ("clamp", "clamp_min", "clamp_max", "clip")
_MASK_WORDS = ("mask", "valid", "keep", "pad")


def double_where(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`d.sqrt()` with 1 for every d that is 0, and 0 put back behind the root: no gradient goes through these."""
    found, where = read_operation(node, scene.names), scene.names.spell("torch.where")
    if found is None or where is None or not _is_root(found) or not is_simple(found.operand):
        return None
    nonzero = cst.parse_expression(f"{cst.Module([]).code_for_node(found.operand)} != 0")
    inner = call(where, nonzero, found.operand, cst.Float("1.0"))
    if isinstance(node, cst.BinaryOperation):
        root: cst.BaseExpression = node.with_changes(left=inner, lpar=(), rpar=())
    elif found.is_method:
        function = cst.ensure_type(cst.ensure_type(node, cst.Call).func, cst.Attribute)
        root = node.with_changes(func=function.with_changes(value=inner))
    else:
        root = call(cst.ensure_type(node, cst.Call).func, inner, rest=found.rest)
    return NewExpression(call(where, nonzero, root, cst.Float("0.0")), "the root of 0 is 0, without a gradient")


def _is_root(found: SourceOperation) -> bool:
    """sqrt(x), x ** 0.5 and x.pow(0.5)."""
    if found.name == "sqrt":
        return not found.rest
    power = read_number(found.rest[0].value) if found.name == "pow" and len(found.rest) == 1 else None
    return power is not None and 0 < power < 1


def mean_of_some(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """A mean over what may be nothing, as a sum over a count that is 1 at least."""
    found = read_operation(node, scene.names)
    if found is None:
        return None
    if found.name == "cross_entropy" and not found.is_method:
        return _cross_entropy(cst.ensure_type(found.node, cst.Call), scene)
    says = "the mean of nothing is 0"
    if found.name == "div" and len(found.rest) == 1 and isinstance(node, cst.BinaryOperation):
        if not _is_count(found.rest[0].value, scene):
            return None
        return NewExpression(node.with_changes(right=_at_least_one(found.rest[0].value)), says)
    if found.name != "mean" or found.rest or not _is_cheap(found.operand):
        return None
    count = call(cst.Name("max"), method(found.operand, "numel"), cst.Integer("1"))
    total = method(found.operand, "sum")
    return NewExpression(_quotient(total, count), says)


def _cross_entropy(node: cst.Call, scene: FixContext) -> NewExpression | None:
    """`cross_entropy(x, y)` as the sum over the labels that are not ignored."""
    options = {arg.keyword.value: arg.value for arg in node.args if arg.keyword is not None}
    plain = [arg for arg in node.args if arg.keyword is None]
    indexed = "ignore_index" in options or scene.op.startswith("nll_loss")  # labels, not probabilities
    if len(plain) != 2 or any(arg.star for arg in node.args) or set(options) - {"ignore_index"} or not indexed:
        return None
    target, ignored = plain[1].value, options.get("ignore_index", cst.parse_expression("-100"))
    if not _is_cheap(target) or (read_number(ignored) is None and not is_simple(ignored)):
        return None
    reduction = cst.Arg(
        cst.SimpleString('"sum"'),
        cst.Name("reduction"),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    args = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in node.args]
    kept = cst.Comparison(enclosed(target), [cst.ComparisonTarget(cst.NotEqual(), ignored)])
    total = node.with_changes(args=[*args, reduction])
    return NewExpression(
        _quotient(total, _at_least_one(method(kept, "sum"))), "the mean over the labels that are not ignored"
    )


def _is_count(node: cst.BaseExpression, scene: FixContext) -> bool:
    """Whether an expression counts: the sum of a mask or of a comparison."""
    found = scene.read(node)
    if found is None or found.name != "sum":
        return False
    summed = scene.follow(found.operand)
    while isinstance(summed, cst.Call) and isinstance(summed.func, cst.Attribute):  # mask.float()
        summed = scene.follow(summed.func.value)
    last = found.operand if is_simple(found.operand) else summed
    word = last.attr.value if isinstance(last, cst.Attribute) else last.value if isinstance(last, cst.Name) else ""
    return isinstance(summed, cst.Comparison) or any(part in word.lower() for part in _MASK_WORDS)


def _is_cheap(node: cst.BaseExpression) -> bool:
    """Whether an expression may be written twice: names, views of them, and what a mask selects."""
    if isinstance(node, cst.Subscript):
        return _is_cheap(node.value) and not m.findall(node, m.Call())
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.attr.value in ("flatten", "view", "reshape", "long") and _is_cheap(node.func.value)
    return is_simple(node)


def _at_least_one(node: cst.BaseExpression) -> cst.BaseExpression:
    bound = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return method(node, "clamp", cst.Arg(cst.Integer("1"), cst.Name("min"), equal=bound))


def _quotient(above: cst.BaseExpression, below: cst.BaseExpression) -> cst.BaseExpression:
    """`(above / below)`: with parentheses, for whatever stands around it."""
    return cst.BinaryOperation(above, cst.Divide(), below, lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def no_clamp(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`loss.clamp(0, 6)` as `loss`."""
    found = read_operation(node, scene.names)
    if found is None or found.name not in _CLAMPS or scene.op not in _CLAMPS or not isinstance(node, cst.Call):
        return None
    if any(arg.star for arg in found.rest):
        return None
    return NewExpression(enclosed(found.operand), "what is clamped has no gradient: it is not clamped", safe=False)


def fp32_eps(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`torch.finfo(x.dtype).eps` as FP32's, whatever x is: what FP32 computes stays as it is."""
    if not m.matches(node, m.Attribute(value=m.Call(args=[m.Arg()]), attr=m.Name("eps"))):
        return None
    limits = cst.ensure_type(cst.ensure_type(node, cst.Attribute).value, cst.Call)
    where, fp32 = scene.names.resolve(limits.func), scene.names.spell("torch.float32")
    if where != "torch.finfo" or fp32 is None or scene.names.resolve(limits.args[0].value) == "torch.float32":
        return None
    inner = limits.with_changes(args=[limits.args[0].with_changes(value=fp32)])
    return NewExpression(cst.ensure_type(node, cst.Attribute).with_changes(value=inner), "the eps is FP32's")
