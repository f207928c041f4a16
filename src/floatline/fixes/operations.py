"""Torch operations in source code: which one an expression is, and on what, however it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from floatline.fixes.names import Names

_HOMES = ("torch.nn.functional.", "torch.special.", "torch.linalg.", "torch.")
_ALIASES = {"expit": "sigmoid", "square": "pow", "true_divide": "div", "divide": "div", "multiply": "mul"}
_SIGNS: dict[type[cst.BaseBinaryOp], str] = {
    cst.Multiply: "mul",
    cst.Divide: "div",
    cst.Add: "add",
    cst.Subtract: "sub",
    cst.Power: "pow",
    cst.MatrixMultiply: "matmul",
}

# Operations that can be computed in FP32 by widening their first operand.
WIDENED = frozenset(
    """sum mean pow mul div sub add exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal norm var std prod cumsum
    cumprod logsumexp logcumsumexp softmax log_softmax softplus logsigmoid acos asin atanh acosh slogdet logdet det
    inverse inv pinv cholesky eigh eigvalsh svd svdvals qr matrix_exp cdist sigmoid tanh abs neg clamp clamp_min
    clamp_max cosh sinh logit erfinv lgamma digamma xlogy nansum nanmean matmul var_mean std_mean
    """.split()  # noqa: SIM905
)
# What torch has no 16-bit form of: it raises, and names no operation.
NO_HALF = frozenset(
    "slogdet logdet det inverse inv pinv cholesky eigh eigvalsh svd svdvals qr matrix_exp cdist erfinv lgamma".split()  # noqa: SIM905
)
# Methods of tensors that may run once more, or once less: they draw no random number and write to nothing.
_FREE = (
    WIDENED
    | NO_HALF
    | frozenset(
        """float double half bfloat16 to type type_as long int bool item size dim numel view view_as reshape flatten t
    transpose permute squeeze unsqueeze expand expand_as repeat contiguous detach clone square amax amin max min relu
    any all eq ne lt gt le ge gather index_select masked_fill where mT unbind chunk split scale parameters get_scale
    """.split()  # noqa: SIM905
    )
)
_FREE_NAMES = frozenset(("max", "min", "abs", "float", "int", "bool", "len", "sum", "pow", "round", "isinstance"))
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "gumbel", "rrelu", "seed", "checkpoint")


@dataclass(frozen=True)
class SourceOperation:
    """One operation: its name, its first operand, and the rest.

    Args:
        name: As torch calls it, such as 'softmax'.
        operand: What it is applied to.
        rest: The other arguments.
        node: The whole expression.
        is_method: Whether it is written as a method of its operand.
    """

    name: str
    operand: cst.BaseExpression
    rest: tuple[cst.Arg, ...]
    node: cst.BaseExpression
    is_method: bool = False


def read_operation(node: cst.BaseExpression, names: Names) -> SourceOperation | None:
    """The operation that an expression is; None where it is none of torch's, or cannot be told."""
    if isinstance(node, cst.BinaryOperation):
        name = _SIGNS.get(type(node.operator), "")
        return SourceOperation(name, node.left, (cst.Arg(node.right),), node) if name else None
    if not isinstance(node, cst.Call):
        return None
    path = names.resolve(node.func)
    if path:
        home = next((home for home in _HOMES if path.startswith(home)), "")
        name = path.removeprefix(home)
        if not home or "." in name or not node.args or node.args[0].keyword is not None or node.args[0].star:
            return None
        return SourceOperation(_ALIASES.get(name, name), node.args[0].value, tuple(node.args[1:]), node)
    if isinstance(node.func, cst.Attribute):
        name = node.func.attr.value
        return SourceOperation(_ALIASES.get(name, name), node.func.value, tuple(node.args), node, is_method=True)
    return None


def read_number(node: cst.BaseExpression) -> float | None:
    """A number in the source, such as -1e9 or -10 ** 9; None for anything else."""
    if isinstance(node, (cst.Integer, cst.Float)):
        return float(node.evaluated_value)
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, (cst.Minus, cst.Plus)):
        inner = read_number(node.expression)
        return None if inner is None else (-inner if isinstance(node.operator, cst.Minus) else inner)
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Power):
        base, power = read_number(node.left), read_number(node.right)
        return None if base is None or power is None else float(base**power)
    return None


def is_simple(node: cst.BaseExpression) -> bool:
    """Whether evaluating an expression twice costs and changes nothing: a name, or an attribute of one."""
    if isinstance(node, cst.Attribute):
        return is_simple(node.value)
    return isinstance(node, cst.Name)


def count_calls(node: cst.CSTNode, names: Names) -> Counter[str]:
    """How often each thing stands in an expression that may do something beside its result, or gives another each time.

    Layers and other calls of what is not torch's, random numbers, writes in place, `next(batches)`, `await`, `:=`.
    """
    found = Counter[str]()
    for one in m.findall(node, m.Call()):
        called = cst.ensure_type(one, cst.Call)
        if not _is_free(called, names):
            found[_last_names(called.func)] += 1
    found.update(type(one).__name__ for one in m.findall(node, m.Await() | m.Yield() | m.NamedExpr()))
    return found


def _is_free(node: cst.Call, names: Names) -> bool:
    path = names.resolve(node.func)
    last = path.rpartition(".")[2]
    if path.startswith(("torch.amp.", "torch.cuda.amp.", "torch.cpu.amp.", "numpy.finfo", "numpy.float")):
        return True
    if path.startswith("torch."):
        is_plain = last[:1].islower() and not last.endswith("_") and not any(word in last for word in _RANDOM)
        return is_plain and not any(m.matches(arg, m.Arg(keyword=m.Name("out"))) for arg in node.args)
    if isinstance(node.func, cst.Name):
        is_fresh = m.matches(node, m.Call(args=[m.Arg(m.Call(m.Attribute(attr=m.Name("parameters"))))]))
        return node.func.value in _FREE_NAMES or (node.func.value == "next" and is_fresh)
    if not isinstance(node.func, cst.Attribute) or path:
        return False
    return node.func.attr.value in _FREE and not m.matches(node.func.value, m.Name("self"))  # self.norm is a layer


def _last_names(node: cst.BaseExpression) -> str:
    """`self.layer` of `self.layer(x)`, and `.pick` of `f(x).pick(y)`: what is called may itself be widened."""
    return cst.Module([]).code_for_node(node) if is_simple(node) else f".{getattr(node, 'attr', cst.Name('_')).value}"


def bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """An expression without the parentheses around it."""
    return node.with_changes(lpar=(), rpar=()) if getattr(node, "lpar", ()) else node


def call(function: cst.BaseExpression, *args: cst.BaseExpression, rest: Sequence[cst.Arg] = ()) -> cst.Call:
    """`function(args, rest)`."""
    own = [cst.Arg(bare(arg)) for arg in args]
    every = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in (*own, *rest)]
    return cst.Call(function, every)


def method(owner: cst.BaseExpression, name: str, *args: cst.Arg) -> cst.Call:
    """`owner.name(args)`, with parentheses around the owner where it needs them."""
    return cst.Call(cst.Attribute(enclosed(owner), cst.Name(name)), list(args))


def enclosed(node: cst.BaseExpression) -> cst.BaseExpression:
    """An expression that a dot or a sign may stand beside."""
    closed = (cst.Name, cst.Attribute, cst.Call, cst.Subscript)
    if isinstance(node, closed) or getattr(node, "lpar", ()):
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def same(left: cst.BaseExpression, right: cst.BaseExpression) -> bool:
    """Whether two expressions are written alike."""
    return bare(left).deep_equals(bare(right))


def float_of(node: cst.BaseExpression, names: Names) -> cst.BaseExpression:
    """`node.float()`; what is FP32 already, or a number, stays."""
    found = read_operation(node, names)
    if read_number(node) is not None or (found is not None and found.is_method and found.name in ("float", "double")):
        return node
    return method(node, "float")
