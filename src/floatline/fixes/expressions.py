"""Expressions that break in 16 bits, and the same in a form that does not: one function for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from floatline.fixes.names import Names
from floatline.fixes.operations import (
    NO_HALF,
    WIDENED,
    SourceOperation,
    bare,
    call,
    enclosed,
    float_of,
    is_simple,
    method,
    read_number,
    read_operation,
    same,
)

Leaf = Callable[[cst.BaseExpression], "cst.BaseExpression | None"]


def widen_tree(node: cst.BaseExpression, names: Names, widen: Leaf | None = None) -> cst.BaseExpression | None:
    """An expression with its tensors widened to FP32 where they enter; None where they are FP32 already.

    Of two operands one is enough, and then the other may be a number: a product of FP32 and 16 bits is FP32. Only a
    matrix product needs both.

    Args:
        node: An operation, or what one is applied to.
        names: The file's imports.
        widen: Widens a tensor, or gives None; None is `.float()`.
    """
    if read_number(node) is not None:
        return None
    if isinstance(node, cst.UnaryOperation):
        inner = widen_tree(node.expression, names, widen)
        return None if inner is None else node.with_changes(expression=inner)
    found = read_operation(node, names)
    if isinstance(node, cst.BinaryOperation):
        return _widen_sides(node, names, widen)
    if found is None or not isinstance(node, cst.Call) or found.name not in WIDENED:
        wide = float_of(node, names)
        return None if wide is node else widen(node) if widen is not None else wide
    inner = widen_tree(found.operand, names, widen)
    if inner is None:
        return None
    if found.is_method:
        function = cst.ensure_type(node.func, cst.Attribute)
        return node.with_changes(func=function.with_changes(value=inner))
    return node.with_changes(args=[node.args[0].with_changes(value=inner), *node.args[1:]])


def _widen_sides(node: cst.BinaryOperation, names: Names, widen: Leaf | None) -> cst.BaseExpression | None:
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
    new = [widen_tree(side, names, widen) if wanted else None for side, wanted in zip(sides, chosen, strict=True)]
    if new == [None, None]:
        return None
    return node.with_changes(left=new[0] or node.left, right=new[1] or node.right)


def _is_computed(node: cst.BaseExpression, names: Names) -> bool:
    if isinstance(node, cst.UnaryOperation):
        return _is_computed(node.expression, names)
    return read_number(node) is None and isinstance(node, (cst.BinaryOperation, cst.Call, cst.Subscript))


_SMALLEST_NORMAL = 2.0**-14  # of FP16
_LARGEST = 65504.0


@dataclass(frozen=True)
class FixContext:
    """What a rewrite may know: the file's imports, what local names were made from, and the operation that failed.

    Args:
        names: Imports.
        made: Local names to the expressions that they were made from.
        op: The operation that failed, such as 'sum'; '' where it is not known.
        is_sure: Whether a finding has named this line.
        part: The module that failed there, such as 'body.0'; '' where it is not known.
        numbers: Names and attributes of self to the numbers that they stand for.
        limit: Tells the number that a constant stands for, or an infinite one of its sign; None where nobody can.
        is_measured: Whether a run showed that what fails is 16 bits; else it may be FP64, which nothing may narrow, and
            what FP32 computes must stay.
    """

    names: Names
    made: Mapping[str, cst.BaseExpression] = field(default_factory=dict[str, cst.BaseExpression])
    op: str = ""
    is_sure: bool = False
    part: str = ""
    is_measured: bool = True
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    limit: Callable[[cst.BaseExpression], float | None] = read_number

    def read(self, node: cst.BaseExpression) -> SourceOperation | None:
        """The operation that an expression is, or that its name was made by."""
        return read_operation(self.follow(node), self.names)

    def number(self, node: cst.BaseExpression) -> float | None:
        """A number, also one that a name of the file, a default or an attribute of self stands for."""
        found = read_number(self.follow(node))
        return self.numbers.get(cst.Module([]).code_for_node(node)) if found is None and is_simple(node) else found

    def follow(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """What a local name was made from; anything else itself."""
        return self.made[node.value] if isinstance(node, cst.Name) and node.value in self.made else node

    def widen(self, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """What is FP32 at least; None where that cannot be said of the expression."""
        if self.is_measured:
            return float_of(node, self.names)
        return widen_tree(node, self.names, self._promote)

    def _promote(self, node: cst.BaseExpression) -> cst.BaseExpression | None:
        promote, wide = self.names.spell("torch.promote_types"), self.names.spell("torch.float32")
        if promote is None or wide is None or not is_simple(node):
            return None
        return method(node, "to", cst.Arg(call(promote, cst.Attribute(node, cst.Name("dtype")), wide)))

    def is_one(self, node: cst.BaseExpression) -> bool:
        """Whether it is the number 1."""
        return read_number(node) == 1.0


@dataclass(frozen=True)
class NewExpression:
    """A new expression.

    Args:
        node: The expression.
        safe: Whether it is the same function in exact arithmetic.
        says: What was done, as one line.
    """

    node: cst.BaseExpression
    says: str
    safe: bool = True


Rewrite = Callable[[cst.BaseExpression, FixContext], NewExpression | None]


def log_sigmoid(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """log(sigmoid(x)) to logsigmoid(x); log(1 - sigmoid(x)) and log1p(-sigmoid(x)) to logsigmoid(-x)."""
    outer = read_operation(node, scene.names)
    if outer is None or outer.rest or (new := scene.names.functional("logsigmoid")) is None:
        return None
    if outer.name == "log1p":
        return _log1p_sigmoid(outer, new, scene)
    if outer.name != "log":
        return None
    inner, safe = scene.read(outer.operand), True
    if inner is not None and inner.name == "add" and scene.is_sure:  # log(sigmoid(x) + 1e-8)
        number = read_number(inner.rest[0].value)
        if number is not None and 0 < number < 1e-3:
            inner, safe = scene.read(inner.operand), False
    if inner is not None and inner.name == "sigmoid":
        return NewExpression(call(new, inner.operand), "log(sigmoid(x)) is logsigmoid(x)", safe)
    if inner is None or inner.name != "sub" or not scene.is_one(inner.operand):
        return None
    inner = scene.read(inner.rest[0].value)
    if inner is None or inner.name != "sigmoid":
        return None
    return NewExpression(call(new, _negative(bare(inner.operand))), "log(1 - sigmoid(x)) is logsigmoid(-x)", safe)


def _log1p_sigmoid(outer: SourceOperation, new: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    minus = scene.follow(outer.operand)
    if not isinstance(minus, cst.UnaryOperation) or not isinstance(minus.operator, cst.Minus):
        return None
    inner = scene.read(minus.expression)
    if inner is None or inner.name != "sigmoid":
        return None
    return NewExpression(call(new, _negative(bare(inner.operand))), "log1p(-sigmoid(x)) is logsigmoid(-x)")


def log_softmax(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """log(softmax(x, dim)) to log_softmax(x, dim)."""
    outer = read_operation(node, scene.names)
    if outer is None or outer.name != "log" or outer.rest:
        return None
    inner, new = scene.read(outer.operand), scene.names.functional("log_softmax")
    if inner is None or inner.name != "softmax" or new is None:
        return None
    if inner.is_method and inner.rest and inner.rest[0].keyword is None:  # F.log_softmax(x, -1) takes it in this place
        return NewExpression(call(new, inner.operand, rest=inner.rest), "log(softmax(x)) is log_softmax(x)")
    return NewExpression(call(new, inner.operand, rest=inner.rest), "log(softmax(x)) is log_softmax(x)")


def softplus(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """log(1 + exp(x)) and log1p(exp(x)) to softplus(x)."""
    outer, new = read_operation(node, scene.names), scene.names.functional("softplus")
    if outer is None or new is None or outer.name not in ("log", "log1p") or outer.rest:
        return None
    inner = scene.read(outer.operand)
    if outer.name == "log":
        if inner is None or inner.name != "add":
            return None
        parts = (inner.operand, inner.rest[0].value)
        other = next((b for a, b in (parts, parts[::-1]) if scene.is_one(a)), None)
        inner = None if other is None else scene.read(other)
    if inner is None or inner.name != "exp":
        return None
    # Not quite the same: torch's softplus is x above 20, which FP32 cannot tell apart, and FP64 can.
    return NewExpression(call(new, inner.operand), "log(1 + exp(x)) is softplus(x)", safe=False)


def log_sum_exp(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """log(sum(exp(x), dim)) to logsumexp(x, dim)."""
    outer, new = read_operation(node, scene.names), scene.names.spell("torch.logsumexp")
    if outer is None or new is None or outer.name != "log" or outer.rest:
        return None
    total = scene.read(outer.operand)
    inner = scene.read(total.operand) if total is not None and total.name == "sum" else None
    if total is None or inner is None or inner.name != "exp" or inner.rest:
        return None
    known = all(arg.keyword is None or arg.keyword.value in ("dim", "keepdim") for arg in total.rest)
    if not known or not any(arg.keyword is None or arg.keyword.value == "dim" for arg in total.rest):
        return None  # a sum over everything, or one that names a dtype
    return NewExpression(call(new, inner.operand, rest=total.rest), "log(sum(exp(x))) is logsumexp(x)")


def exp_ratio(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """exp(x) / exp(x).sum(dim, keepdim=True) to softmax(x, dim); 1 / (1 + exp(-x)) to sigmoid(x)."""
    fraction = read_operation(node, scene.names)
    if fraction is None or fraction.name != "div" or len(fraction.rest) != 1:
        return None
    above, below = fraction.operand, scene.read(fraction.rest[0].value)
    if below is None:
        return None
    if below.name == "add":
        return _sigmoid(above, below, scene)
    top, new = scene.read(above), scene.names.spell("torch.softmax")
    inner = scene.read(below.operand) if below.name == "sum" else None
    if top is None or inner is None or new is None or top.name != "exp" or inner.name != "exp":
        return None
    keeps = any(arg.keyword and arg.keyword.value == "keepdim" and _is_true(arg) for arg in below.rest)
    dims = [arg for arg in below.rest if arg.keyword is None or arg.keyword.value == "dim"]
    if not keeps or len(dims) != 1 or not same(top.operand, inner.operand):
        return None
    return NewExpression(call(new, top.operand, rest=dims), "exp(x) / sum(exp(x)) is softmax(x)")


def bce_with_logits(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """binary_cross_entropy(sigmoid(x), t) to binary_cross_entropy_with_logits(x, t)."""
    outer, new = read_operation(node, scene.names), scene.names.functional("binary_cross_entropy_with_logits")
    if outer is None or outer.name != "binary_cross_entropy" or outer.is_method or new is None:
        return None
    inner = scene.read(outer.operand)
    if inner is None or inner.name != "sigmoid":
        return None
    says = "binary_cross_entropy of a sigmoid is binary_cross_entropy_with_logits"
    return NewExpression(call(new, inner.operand, rest=outer.rest), says)


def mask_constant(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """masked_fill(x, mask, -1e9) and where(mask, x, -1e9) with the smallest number of x's dtype; 1e9 with its largest.

    Where nobody can tell the constant's sign it stays: what is hidden from a maximum would be all that it finds.
    """
    found, finfo = read_operation(node, scene.names), scene.names.spell("torch.finfo")
    if found is None or finfo is None or not isinstance(node, cst.Call):
        return None
    place = _place_of_constant(node, found, scene)
    if place is None:
        return None
    x, index, number = place
    if not scene.is_measured and "mask" in cst.Module([]).code_for_node(x).lower():
        return None  # it may be boolean
    if not is_simple(x) or abs(number) <= _LARGEST:
        return None
    which, word = ("min", "smallest") if number < 0 else ("max", "largest")
    args = [*node.args]
    args[index] = args[index].with_changes(
        value=cst.Attribute(call(finfo, cst.Attribute(x, cst.Name("dtype"))), cst.Name(which))
    )
    return NewExpression(node.with_changes(args=args), f"the mask's constant is the {word} number of the dtype")


def _place_of_constant(
    node: cst.Call, found: SourceOperation, scene: FixContext
) -> tuple[cst.BaseExpression, int, float] | None:
    """What is filled, the place of the constant among the arguments, and the number that it stands for."""
    read = scene.limit if scene.is_sure else read_number
    if found.name in ("masked_fill", "masked_fill_") and len(found.rest) == 2:
        words = [arg.keyword.value if arg.keyword is not None else "" for arg in node.args]
        index = words.index("value") if "value" in words else len(words) - 1
        number = read(node.args[index].value)
        return None if number is None else (found.operand, index, number)
    if found.name != "where" or found.is_method or len(node.args) != 3:
        return None
    numbers = [read(arg.value) for arg in node.args[1:]]
    if (numbers[0] is None) == (numbers[1] is None):
        return None
    index = 1 if numbers[0] is not None else 2
    number = numbers[index - 1]
    return None if number is None else (node.args[3 - index].value, index, number)


def small_eps(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """y + 1e-8 and y.clamp(min=1e-8) with y in FP32; a quotient by it goes back to the dtype of what is divided.

    Where a quotient is known to fail, its eps becomes 1e-4 at least: the gradient of x / eps is 1 / eps, and FP16 ends
    at 65504.
    """
    found = read_operation(node, scene.names)
    if found is None:
        return None
    if found.name == "div" and len(found.rest) == 1 and is_simple(found.operand):
        inner = small_eps(bare(found.rest[0].value), scene)
        if inner is None or not isinstance(node, cst.BinaryOperation):
            return None
        under = _larger_eps(inner.node, scene) if scene.is_sure and scene.is_measured else inner.node
        whole = node.with_changes(right=enclosed(bare(under)), lpar=(), rpar=())
        back = method(whole, "to", cst.Arg(_dtype_of_quotient(found.operand, under, scene)))
        return NewExpression(back, inner.says, safe=under is inner.node)
    says = "the eps is added in FP32, where it is not 0"
    if found.name == "add" and isinstance(node, cst.BinaryOperation):
        for side, value, eps in (("left", node.left, node.right), ("right", node.right, node.left)):
            wide = scene.widen(value) if _is_eps(eps, scene) else None
            if wide is not None and not same(value, wide):
                return NewExpression(node.with_changes(**{side: wide}), says)
        return None
    bounds = [arg.value for arg in found.rest if arg.keyword is None or arg.keyword.value in ("min", "eps")]
    if found.name not in ("clamp", "clamp_min", "normalize", "cosine_similarity"):
        return None
    is_small = any(_is_eps(bound, scene) for bound in bounds) or (found.name == "normalize" and scene.is_sure)
    return _on_float(found, scene, says) if is_small else None


def _dtype_of_quotient(above: cst.BaseExpression, below: cst.BaseExpression, scene: FixContext) -> cst.BaseExpression:
    """x.dtype; where what it is divided by may be FP64, or x a number, torch.result_type(x, y)."""
    plain, of_both = cst.Attribute(above, cst.Name("dtype")), scene.names.spell("torch.result_type")
    widened = m.findall(below, m.Call(m.Attribute(attr=m.Name("to")), args=[m.Arg(m.Call())]))
    owners = [cst.ensure_type(cst.ensure_type(one, cst.Call).func, cst.Attribute).value for one in widened]
    other = next((one for one in owners if is_simple(one) and not same(one, above)), None)
    if scene.is_measured or other is None or of_both is None:
        return plain
    return call(of_both, above, other)


def float_operands(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """The operation that failed, and what it is made of in this statement, in FP32."""
    found = read_operation(node, scene.names)
    if found is None or found.name not in ((scene.op,) if scene.op else NO_HALF) or found.name not in WIDENED:
        return None
    wide = widen_tree(node, scene.names)
    return None if wide is None else NewExpression(wide, f"{found.name} is computed in FP32")


def _on_float(found: SourceOperation, scene: FixContext, says: str) -> NewExpression | None:
    wide = scene.widen(found.operand)
    if wide is None or wide is found.operand or not isinstance(found.node, cst.Call):
        return None
    if found.is_method:
        function = cst.ensure_type(found.node.func, cst.Attribute)
        return NewExpression(found.node.with_changes(func=function.with_changes(value=wide)), says)
    first = found.node.args[0].with_changes(value=wide)
    return NewExpression(found.node.with_changes(args=[first, *found.node.args[1:]]), says)


def _sigmoid(above: cst.BaseExpression, below: SourceOperation, scene: FixContext) -> NewExpression | None:
    parts = (below.operand, below.rest[0].value)
    other = next((b for a, b in (parts, parts[::-1]) if scene.is_one(a)), None)
    inner = None if other is None else scene.read(other)
    new = scene.names.spell("torch.sigmoid")
    if inner is None or inner.name != "exp" or new is None:
        return None
    x = bare(inner.operand)
    if scene.is_one(above):
        return NewExpression(call(new, _negative(x)), "1 / (1 + exp(-x)) is sigmoid(x)")
    top = scene.read(above)
    if top is None or top.name != "exp" or not same(top.operand, x):
        return None
    return NewExpression(call(new, x), "exp(x) / (1 + exp(x)) is sigmoid(x)")


def _negative(node: cst.BaseExpression) -> cst.BaseExpression:
    """-x for x, x for -x, and a * b for -a * b."""
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        return node.expression
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Multiply, cst.Divide)):
        left = node.left
        if isinstance(left, cst.UnaryOperation) and isinstance(left.operator, cst.Minus):
            return node.with_changes(left=left.expression)
    return cst.UnaryOperation(cst.Minus(), enclosed(node))


def _larger_eps(node: cst.BaseExpression, scene: FixContext) -> cst.BaseExpression:
    """y + 1e-4 for y + 1e-8, and y + max(eps, 1e-4) for y + eps."""
    if not isinstance(node, cst.BinaryOperation):
        return node
    for side, eps in (("right", node.right), ("left", node.left)):
        if _is_eps(eps, scene):
            least = cst.Float("1e-4")
            return node.with_changes(**{side: least if read_number(eps) else call(cst.Name("max"), eps, least)})
    return node


def _is_eps(node: cst.BaseExpression, scene: FixContext) -> bool:
    number = scene.number(node)
    if number is not None:
        return 0 < number < _SMALLEST_NORMAL
    last = node.attr.value if isinstance(node, cst.Attribute) else node.value if isinstance(node, cst.Name) else ""
    return scene.is_sure and "eps" in last.lower()


def _is_true(arg: cst.Arg) -> bool:
    return isinstance(arg.value, cst.Name) and arg.value.value == "True"
