"""Operations on tensors: those that the file shows by their options, what they pass through, and their bounds."""

from __future__ import annotations

import ast

from floatline.lint.reading.source import Operation, Source
from floatline.lint.reading.source_tree import keyword, make_operation, parameters
from floatline.lint.reading.values import assignments, reaching_values

# The same numbers in another shape.
SHAPES = frozenset(
    """unsqueeze squeeze view reshape transpose permute flatten expand expand_as contiguous clone t unflatten
    view_as reshape_as repeat movedim to cuda cpu""".split()  # noqa: SIM905
)
_OPTIONS = frozenset(("dim", "keepdim"))  # numpy says axis and keepdims
_DEPTH = 8
_BOUNDS = frozenset(("max", "amax", "logsumexp", "log_softmax", "logsigmoid", "clamp", "clamp_max", "minimum", "min"))
_EVEN = frozenset(("abs", "square", "cdist", "norm", "relu", "softplus", "exp"))
_LARGEST_EXPONENT = 11.09  # exp of more is inf in FP16
ASKS_FOR_FINITE = frozenset(("isfinite", "isnan", "isinf"))


def read_tensor_operation(source: Source, node: ast.AST | None) -> Operation | None:
    """As `source.operation`, and also `x.sum(dim=1)` of an unknown x, or `x.sum()` in a module: those are tensors."""
    found = source.operation(node)
    if found is not None or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return found
    name, owner = node.func.attr, node.func.value
    if source.path(node.func) or any(isinstance(arg, ast.Starred) for arg in node.args):
        return None
    keywords = {word.arg: word.value for word in node.keywords if word.arg}
    if not keywords.keys() & _OPTIONS and (
        not source.is_module_class(source.class_of(node)) or _is_of_numpy(source, owner)
    ):
        return None
    return make_operation(name, owner, node.args, keywords, node, is_method=True)


def _is_of_numpy(source: Source, node: ast.expr) -> bool:
    made = source.value(node)
    while isinstance(made, (ast.Call, ast.Attribute, ast.Subscript)):
        if source.path(made).startswith("numpy."):
            return True
        if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr == "numpy":
            return True
        made = made.func if isinstance(made, ast.Call) else made.value
    return source.path(made) == "numpy"


def pass_shapes(source: Source, node: ast.expr) -> ast.expr:
    """What an expression was before it was only reshaped, indexed, or given a name."""
    for _ in range(_DEPTH):
        made = source.value(node)
        if isinstance(made, ast.Subscript):
            made = made.value
        elif isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in SHAPES:
            made = made.func.value
        if made is node:
            return node
        node = made
    return node


def is_wide(source: Source, node: ast.expr) -> bool:
    """Whether it is FP32: where it is made, on one way at least; or, of a parameter, wherever the file calls it."""
    if source.dtype(node) == "wide":
        return True
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    if any(one is not None and source.dtype(one) == "wide" for name in names for one in reaching_values(source, name)):
        return True
    return any(_is_given_wide(source, name) for name in names)


def _is_given_wide(source: Source, node: ast.Name) -> bool:
    """`self._norm(x.float())`, where the name is the parameter x of `_norm`."""
    function = source.function(node)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    names = parameters(function, only_by_place=True)
    if node.id not in names or source.value(node) is not node:
        return False
    place = names.index(node.id)
    given: list[ast.expr | None] = []
    for call in source.calls.get(function.name, ()):
        own = int(isinstance(call.func, ast.Attribute) and names[0] in ("self", "cls"))
        by_place = call.args[place - own] if 0 <= place - own < len(call.args) else None
        given.append(keyword(call, node.id) or by_place)
    if not given and function.name.startswith("_") and names[0] == "self":
        return True  # called by a class of another file, which may have cast it
    return bool(given) and all(one is not None and source.dtype(one) == "wide" for one in given)


def is_same(left: ast.AST, right: ast.AST) -> bool:
    """Whether two expressions are written alike."""
    return type(left) is type(right) and ast.dump(left) == ast.dump(right)


def read_square(source: Source, node: ast.expr) -> ast.expr | None:
    """x of x ** 2, x * x, x.pow(2) and torch.square(x); None where it is none of them."""
    found = source.operation(source.value(node))
    if found is None:
        return None
    if found.name == "square":
        return found.operand
    if found.name == "mul" and isinstance(found.node, ast.BinOp):
        return found.operand if is_same(found.operand, found.args[0]) else None
    power = found.argument(0, "exponent") if found.name == "pow" else None
    return found.operand if power is not None and source.number(power) == 2.0 else None


def is_bfloat16(source: Source, node: ast.expr, *, depth: int = 0) -> bool:
    """Whether the 16 bits that an expression is shown to have are BF16's."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == "bfloat16":
            return True
        if isinstance(part, ast.Name):
            if source.path(part) == "torch.bfloat16":
                return True
            made = source.value(part)
            if depth < _DEPTH and made is not part and is_bfloat16(source, made, depth=depth + 1):
                return True
    return False


def read_exp(source: Source, node: ast.expr) -> ast.expr | None:
    """What exp is taken of, where an expression, or what its name was made from, is one; else None."""
    found = source.operation(source.value(node))
    return found.operand if found is not None and found.name == "exp" and not found.args else None


def is_bounded(source: Source, node: ast.expr, *, depth: int = 0) -> bool:
    """Whether the file shows a bound above: a value shifted by its maximum, clamped, or minus a square."""
    if isinstance(node, ast.Name) and _is_shifted_in_place(source, node):
        return True
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
    if isinstance(node, ast.Name):
        ways = reaching_values(source, node)  # one for each branch of an `if`
        return len(ways) > 1 and all(way is not None and is_bounded(source, way, depth=depth + 1) for way in ways)
    found = source.operation(node)
    if found is None or found.name not in _BOUNDS:
        return False
    most = found.argument(1, "max") if found.name == "clamp" else found.argument(0, "max")
    number = source.number(most) if found.name in ("clamp", "clamp_max") and most is not None else None
    return number is None or number <= _LARGEST_EXPONENT


def _is_shifted_in_place(source: Source, node: ast.Name) -> bool:
    """`x.sub_(x.max(-1)[0].unsqueeze(-1))` or `x -= x.max()` above it."""
    for one in ast.walk(source.function(node)):
        if getattr(one, "lineno", node.lineno) >= node.lineno:
            continue
        if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Sub) and is_same_name(one.target, node):
            return _mentions_bound(source, one.value, depth=0)
        if isinstance(one, ast.Call) and _is_method_of(one, node, "sub_"):
            return bool(one.args) and _mentions_bound(source, one.args[0], depth=0)
    return False


def _is_method_of(call: ast.Call, node: ast.Name, name: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == name and is_same_name(call.func.value, node)


def is_same_name(left: ast.AST, right: ast.Name) -> bool:
    """Whether a node is the same name."""
    return isinstance(left, ast.Name) and left.id == right.id


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
            if "max" in one.id.lower() or _is_part_of_max(source, one):  # given from elsewhere, or unpacked
                return True
    return False


def _is_part_of_max(source: Source, node: ast.Name) -> bool:
    """m of `m, _ = x.max(-1)`."""
    statements = assignments(source, source.function(node)).get(node.id, ())
    made = [at.value for at, value in statements if value is None and isinstance(at, ast.Assign)]
    return any(isinstance(one, ast.Call) and source.call_name(one) in ("max", "amax") for one in made)


def asks_for_finite(source: Source, node: ast.AST, *, depth: int = 0) -> bool:
    """Whether an expression asks isfinite, isnan or isinf: by itself, by what its names are made from, or a flag."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and source.call_name(one) in ASKS_FOR_FINITE:
            return True
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and depth < 4:
            made = source.value(one)
            if made is not one and asks_for_finite(source, made, depth=depth + 1):
                return True
            if _is_flag_of_finite(source, one, depth=depth):
                return True
    return False


def _is_flag_of_finite(source: Source, node: ast.Name, *, depth: int) -> bool:
    """`bad` of `bad = False; for p in …: if isinf(p.grad).any(): bad = True`."""
    for at, value in assignments(source, source.function(node)).get(node.id, ()):
        above = source.parents.get(at)
        if not isinstance(value, ast.Constant) or not isinstance(value.value, bool) or not isinstance(above, ast.If):
            continue
        if asks_for_finite(source, above.test, depth=depth + 1):
            return True
    return False
