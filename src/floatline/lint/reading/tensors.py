"""Operations on tensors that the file shows by their options or by where they stand, and what they pass through."""

from __future__ import annotations

import ast

from floatline.lint.reading.source import Operation, Source
from floatline.lint.reading.values import reaching_values

# The same numbers in another shape.
SHAPES = frozenset(
    """unsqueeze squeeze view reshape transpose permute flatten expand expand_as contiguous clone t unflatten
    view_as reshape_as repeat movedim to cuda cpu""".split()  # noqa: SIM905
)
_OPTIONS = frozenset(("dim", "keepdim"))  # numpy says axis and keepdims
_DEPTH = 8


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
    plain = name.rstrip("_") if not name.startswith("_") else name
    return Operation(plain, owner, tuple(node.args), keywords, node, True, is_in_place=plain != name)


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
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if node.id not in names or source.value(node) is not node:
        return False
    calls = _calls_of(source).get(function.name, ())
    place = names.index(node.id)
    given: list[ast.expr | None] = []
    for call in calls:
        own = int(isinstance(call.func, ast.Attribute) and names[0] in ("self", "cls"))
        named = next((word.value for word in call.keywords if word.arg == node.id), None)
        by_place = call.args[place - own] if 0 <= place - own < len(call.args) else None
        given.append(named or by_place)
    if not given and function.name.startswith("_") and names[0] == "self":
        return True  # called by a class of another file, which may have cast it
    return bool(given) and all(one is not None and source.dtype(one) == "wide" for one in given)


def _calls_of(source: Source) -> dict[str, list[ast.Call]]:
    """The calls of the file by their last names."""
    known: dict[str, list[ast.Call]] | None = source.__dict__.get("_calls_by_name")
    if known is None:
        known = {}
        for part in ast.walk(source.tree):
            if isinstance(part, ast.Call) and (name := source.call_name(part)):
                known.setdefault(name, []).append(part)
        source.__dict__["_calls_by_name"] = known
    return known


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
