"""What a file shows of its values: numbers, dtypes, and whether something is a tensor. What it does not show is ''.

A name is followed to the assignment that reaches it: the last one before it, in a block around it. Where another
branch may have given it something else, the answer holds only if both agree.
"""

from __future__ import annotations

import ast
import bisect
import math
from collections.abc import Sequence

from floatline.lint.reading.source_tree import Operation, SourceTree, keyword, last_name, parameters, read_once

_DTYPES = {
    **dict.fromkeys(("float32", "float64", "float", "double"), "wide"),
    **dict.fromkeys(("float16", "half", "bfloat16", "float8_e4m3fn", "float8_e5m2"), "half"),
    **dict.fromkeys(("int8", "int16", "int32", "int64", "int", "long", "short", "bool", "uint8"), "integer"),
}
_CASTS = {
    **dict.fromkeys(("float", "double"), "wide"),
    **dict.fromkeys(("half", "bfloat16"), "half"),
    **dict.fromkeys(("long", "int", "bool", "short", "byte"), "integer"),
}
_MAKERS = frozenset(("zeros", "ones", "full", "empty", "rand", "randn", "linspace", "eye", "logspace"))
_LIKE = frozenset(("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "clone", "detach"))
# Products go to 16 bits under autocast, whatever their operands are.
_PRODUCTS = frozenset(
    """matmul mm bmm addmm baddbmm einsum linear conv1d conv2d conv3d scaled_dot_product_attention mv dot
    bilinear""".split()  # noqa: SIM905
)
_SHAPES = frozenset(
    """view reshape transpose permute squeeze unsqueeze flatten unflatten expand repeat contiguous movedim
    swapaxes""".split()  # noqa: SIM905
)
_INDICES = frozenset(("argmax", "argmin", "argsort", "randint", "randperm", "nonzero", "bincount", "one_hot"))
_MOST_ASSIGNMENTS = 200  # of one name that may reach a place
_DEPTH = 12  # of names that stand for names: beyond, the answer is "not shown"
_DEEP = 60  # of answers that are kept, which no circle can lead beyond


def read_number(source: SourceTree, node: ast.AST | None, *, depth: int = 0) -> float | None:
    """A number that the file shows; infinities count, NaN does not."""
    if node is None or depth > _DEPTH:
        return None
    if isinstance(node, ast.Constant):
        plain = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
        return _finite_or_inf(node.value) if plain else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inner = read_number(source, node.operand, depth=depth + 1)
        return None if inner is None else -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp):
        return _compute(
            node.op, read_number(source, node.left, depth=depth + 1), read_number(source, node.right, depth=depth + 1)
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float" and node.args:
        return _read_infinity(node.args[0]) or read_number(source, node.args[0], depth=depth + 1)
    if isinstance(node, (ast.Name, ast.Attribute)) and source.path(node) in ("math.inf", "torch.inf", "numpy.inf"):
        return math.inf
    if isinstance(node, ast.Name):
        made = read_value(source, node)
        return _imported_number(source, node) if made is node else read_number(source, made, depth=depth + 1)
    return _imported_number(source, node) if isinstance(node, ast.Attribute) else None


def _imported_number(source: SourceTree, node: ast.Name | ast.Attribute) -> float | None:
    """`NEG_INF` after `from .constants import NEG_INF`, and `constants.NEG_INF` after `from . import constants`."""
    if source.neighbours is None or not last_name(node).isupper():
        return None
    owner = node if isinstance(node, ast.Name) else node.value
    if not isinstance(owner, ast.Name) or owner.id not in source.imported:
        return None
    if owner.id in _parameters(source.function(node)) or owner.id in assignments(source, source.tree):
        return None
    module, name = source.imported[owner.id]
    if isinstance(node, ast.Attribute):
        module, name = f"{module}{'' if module.endswith('.') else '.'}{name}", node.attr
    return source.neighbours.find_number(source.file, module, name)


def _compute(sign: ast.operator, left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    try:
        if isinstance(sign, ast.Pow):
            return _finite_or_inf(float(left) ** right) if abs(right) < 1e4 else None
        if isinstance(sign, ast.Mult):
            return left * right
        if isinstance(sign, ast.Div):
            return left / right
        if isinstance(sign, ast.Add):
            return left + right
        return left - right if isinstance(sign, ast.Sub) else None
    except (OverflowError, ZeroDivisionError, TypeError):
        return None


def _finite_or_inf(value: object) -> float | None:
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (OverflowError, TypeError):
        return None
    return None if math.isnan(number) else number


def _read_infinity(node: ast.expr) -> float | None:
    words = {"inf": math.inf, "+inf": math.inf, "-inf": -math.inf, "infinity": math.inf, "-infinity": -math.inf}
    text = node.value if isinstance(node, ast.Constant) else None
    return words.get(text.strip().lower()) if isinstance(text, str) else None


def read_value(source: SourceTree, node: ast.expr) -> ast.expr:
    """What a name was made from, where one assignment reaches it; else the node itself."""
    if not isinstance(node, ast.Name):
        return node
    reaching = reaching_values(source, node)
    if len(reaching) == 1 and reaching[0] is not None:
        return reaching[0]
    return node


def reaching_values(source: SourceTree, node: ast.Name) -> list[ast.expr | None]:
    """What may have been assigned to a name where it is used; None stands for what is not one expression.

    An empty list: the name is a parameter, comes from outside, or is never assigned before.
    """
    function = source.function(node)
    known = assignments(source, function).get(node.id)
    if known is None:
        if isinstance(function, ast.Module) or node.id in _parameters(function):
            return []
        return [value for _, value in assignments(source, source.tree).get(node.id, ())]
    above = list(source.ancestors(node))
    around = {id(one) for one in above}
    later = bisect.bisect_left(known, node.lineno, key=lambda one: one[0].lineno)
    if min(later, _MOST_ASSIGNMENTS) + len(known) - later > _MOST_ASSIGNMENTS and any(map(_is_loop, above)):
        return [None]  # nobody wrote that by hand, and it would take long
    reaching = (
        [value for at, value in known[later:] if _shares_loop(source, at, around)] if any(map(_is_loop, above)) else []
    )
    for place in range(later - 1, -1, -1):
        statement, value = known[place]
        # A statement around the name itself (`x = x.float()`) does not reach it; a loop's own name reaches its body.
        if id(statement) in around and not _has_block(statement):
            continue
        if later - place > _MOST_ASSIGNMENTS:
            return [None]
        reaching.append(value)
        if _dominates(source, statement, around):
            return reaching
    return [*reaching, None] if node.id in _parameters(function) or len(reaching) != len(known) else reaching


def _is_loop(node: ast.AST) -> bool:
    return isinstance(node, (ast.For, ast.AsyncFor, ast.While))


def _has_block(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith))


def _shares_loop(source: SourceTree, statement: ast.stmt, around: set[int]) -> bool:
    """Whether a later statement is reached before the use in the next turn of a loop around both."""
    return any(_is_loop(above) and id(above) in around for above in source.ancestors(statement))


def _casts_by_dtype(source: SourceTree, statement: ast.stmt, above: ast.AST | None) -> bool:
    """`if x.dtype in (half, bfloat16): x = x.float()`, which casts all that is 16 bits."""
    if not isinstance(above, ast.If) or not chooses_by_dtype(source, above.test):
        return False
    made = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(made, ast.Call) and _told_dtype(source, made, 0) == "wide"


def _dominates(source: SourceTree, statement: ast.stmt, around: set[int]) -> bool:
    """Whether control cannot reach the use without passing the statement: they share a block."""
    if _has_block(statement) and id(statement) in around:
        return True
    above = source.parents.get(statement)
    if id(above) not in around and _casts_by_dtype(source, statement, above):
        return True
    if id(above) not in around:
        return isinstance(above, (ast.With, ast.AsyncWith)) and _dominates(source, above, around)
    if not isinstance(above, (ast.If, ast.For, ast.While, ast.Try, ast.AsyncFor)):
        return True
    for block in ("body", "orelse", "finalbody"):
        inside: Sequence[ast.stmt] = getattr(above, block, ())
        if any(one is statement for one in inside):
            return any(id(one) in around for one in inside)
    return False


_OF_DTYPES = frozenset("dtype float16 bfloat16 float32 itemsize element_size HalfTensor BFloat16Tensor".split())  # noqa: SIM905


def mentions_dtype(test: ast.expr) -> bool:
    """Whether a test asks for a dtype."""
    return any(isinstance(one, ast.Attribute) and one.attr in _OF_DTYPES for one in ast.walk(test))


def chooses_by_dtype(source: SourceTree, test: ast.expr) -> bool:
    """Whether a test asks for a dtype, or for what a name holds that asked for one: `if is_half:`."""
    names = [read_value(source, one) for one in ast.walk(test) if isinstance(one, ast.Name)]
    return any(mentions_dtype(one) for one in (test, *names))


def _parameters(function: ast.AST) -> set[str]:
    arguments = getattr(function, "args", None)
    rest = (arguments.vararg, arguments.kwarg) if isinstance(arguments, ast.arguments) else ()
    return {*parameters(function), *(one.arg for one in rest if one is not None)}


@read_once
def assignments(source: SourceTree, function: ast.AST) -> dict[str, list[tuple[ast.stmt, ast.expr | None]]]:
    """Every assignment to a name in a function, in the file's order: the statement, and its value if that is one."""
    del source
    found: dict[str, list[tuple[ast.stmt, ast.expr | None]]] = {}
    body: list[ast.AST] = [] if isinstance(function, ast.Lambda) else getattr(function, "body", [])
    waiting = body[::-1]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name, alone in _pair(target, node.value):
                    found.setdefault(name, []).append((node, alone))
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            alone = node.value if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else None
            for name in _names_in(node.target):
                found.setdefault(name, []).append((node, alone))
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            for name in _names_in(node.target):
                found.setdefault(name, []).append((node, None))
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                for name in _names_in(item.optional_vars) if item.optional_vars else ():
                    found.setdefault(name, []).append((node, None))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            inner = [one for one in ast.iter_child_nodes(node) if isinstance(one, (ast.stmt, ast.ExceptHandler))]
            waiting.extend(reversed(inner))
    return found


def _pair(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr | None]]:
    """The names of a target, each with its own value where that is one expression: `a, b = 1, 2` is two."""
    if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
        parts = (*target.elts, *value.elts)
        if len(target.elts) == len(value.elts) and not any(isinstance(part, ast.Starred) for part in parts):
            return [one for left, right in zip(target.elts, value.elts, strict=True) for one in _pair(left, right)]
    alone = value if isinstance(target, ast.Name) else None
    return [(name, alone) for name in _names_in(target)]


def _names_in(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for part in target.elts for name in _names_in(part)]
    if isinstance(target, (ast.Starred, ast.Subscript)):  # p[0] = 1 writes to p
        return _names_in(target.value)
    return []


def read_dtype(source: SourceTree, node: ast.expr, *, depth: int = 0) -> str:
    """'half', 'wide', 'integer', or ''."""
    if depth > _DEEP:
        return ""
    # Read once: a loop's names are made from each other, and every way around them would be walked.
    known = source.answers.setdefault(read_dtype, {})
    if node not in known:
        known[node] = ""
        known[node] = _show_dtype(source, node, depth)
    return known[node]


def _show_dtype(source: SourceTree, node: ast.expr, depth: int) -> str:
    if isinstance(node, ast.Name):
        values = reaching_values(source, node)
        kinds = {read_dtype(source, value, depth=depth + 1) if value is not None else "" for value in values}
        if kinds in ({""}, {"", "wide"}) and _is_cast_apart(source, node, values):
            return "wide"
        return kinds.pop() if len(kinds) == 1 else ""
    if isinstance(node, ast.Compare):
        return "integer"
    if isinstance(node, ast.UnaryOp):
        return "integer" if isinstance(node.op, ast.Not) else read_dtype(source, node.operand, depth=depth + 1)
    if isinstance(node, ast.Subscript):
        return read_dtype(source, node.value, depth=depth + 1)
    if isinstance(node, ast.Attribute):
        return read_dtype(source, node.value, depth=depth + 1) if node.attr in ("T", "mT", "data", "real") else ""
    if isinstance(node, ast.IfExp):
        kinds = {read_dtype(source, side, depth=depth + 1) for side in (node.body, node.orelse)}
        if "wide" in kinds and "half" not in kinds and chooses_by_dtype(source, node.test):
            return "wide"
        return kinds.pop() if len(kinds) == 1 else ""
    if isinstance(node, ast.Call) and (told := _told_dtype(source, node, depth)) is not None:
        return told
    if isinstance(node, ast.Call) and gives_wide(source, node, depth=depth + 1):
        return "wide"
    found = source.operation(node)
    return "" if found is None else _result_dtype(source, found, depth)


def _is_cast_apart(source: SourceTree, node: ast.Name, values: Sequence[ast.expr | None]) -> bool:
    """Whether what is 16 bits was cast in the branch of an `if` that asks for it, or by a helper: `x, w = up(x, w)`."""
    for one in values:
        made = None if one is None else source.parents.get(one)
        if isinstance(made, ast.stmt) and _casts_by_dtype(source, made, source.parents.get(made)):
            return True
    if [*values] != [None]:
        return False
    before = [
        at
        for at, _ in assignments(source, source.function(node)).get(node.id, ())
        if (at.end_lineno or at.lineno) < node.lineno
    ]
    made = before[-1].value if before and isinstance(before[-1], ast.Assign) else None
    return isinstance(made, ast.Call) and gives_wide(source, made, depth=1)


def gives_wide(source: SourceTree, node: ast.Call, *, depth: int = 0) -> bool:
    """Whether a function of the file is called that gives FP32, for whatever is 16 bits at least."""
    function = _find_function(source, node.func)
    return function is not None and depth < _DEPTH and _gives_wide(source, function)


def _find_function(source: SourceTree, called: ast.expr) -> ast.FunctionDef | ast.Lambda | None:
    """The one function or method of the file that has the name of what is called: `up`, `self.up`, `Model.up`."""
    if isinstance(called, ast.Name):
        found = _functions(source, source.tree).get(called.id, ())
    elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        is_own = called.value.id in ("self", "cls") or called.value.id in source.classes
        found = _functions(source, source.tree).get(f".{called.attr}", ()) if is_own else ()
    else:
        return None
    return found[0] if len(found) == 1 else None


@read_once
def _functions(source: SourceTree, tree: ast.AST) -> dict[str, list[ast.FunctionDef | ast.Lambda]]:
    """The functions of a file by their names, methods by `.name`; lambdas by the names of the file that hold them."""
    del tree
    found: dict[str, list[ast.FunctionDef | ast.Lambda]] = {}
    owners = [("", source.tree.body), *((".", one.body) for one in source.classes.values())]
    for dot, body in owners:
        for one in body:
            if isinstance(one, ast.FunctionDef):
                found.setdefault(f"{dot}{one.name}", []).append(one)
            elif isinstance(one, ast.Assign) and isinstance(one.value, ast.Lambda):
                for target in one.targets:
                    found.setdefault(f"{dot}{getattr(target, 'id', '')}", []).append(one.value)
    return found


def _gives_wide(source: SourceTree, function: ast.FunctionDef | ast.Lambda) -> bool:
    known = source.answers.setdefault(_gives_wide, {})
    if function not in known:
        known[function] = False  # one that calls itself shows nothing by that
        known[function] = _shows_wide_ends(source, function)
    return known[function]


def _shows_wide_ends(source: SourceTree, function: ast.FunctionDef | ast.Lambda) -> bool:
    if isinstance(function, ast.Lambda):
        return _are_wide(source, function.body)
    returns = [one for one in ast.walk(function) if isinstance(one, ast.Return) and source.function(one) is function]
    given = [one.value for one in returns if one.value is not None]
    wide = [_are_wide(source, one) for one in given]
    if not any(wide):
        return False
    # `if x.dtype == torch.half: return x.float()`, and then `return x`.
    asked = [one for one, is_wide in zip(returns, wide, strict=False) if is_wide]
    by_dtype = any(
        isinstance(above, ast.If) and chooses_by_dtype(source, above.test)
        for one in asked
        for above in source.ancestors(one)
    )
    rest = (one for one, is_wide in zip(given, wide, strict=True) if not is_wide)
    return all(by_dtype and isinstance(one, ast.Name) and one.id in _parameters(function) for one in rest)


def _are_wide(source: SourceTree, node: ast.expr) -> bool:
    """Whether an expression, or each one of several, is FP32."""
    if isinstance(node, (ast.Tuple, ast.List)) and node.elts:
        return all(_are_wide(source, one) for one in node.elts)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return _are_wide(source, node.elt)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("tuple", "list", "map"):
        return len(node.args) == 1 and _are_wide(source, node.args[0])
    return read_dtype(source, node) == "wide"


def _told_dtype(source: SourceTree, node: ast.Call, depth: int) -> str | None:
    """The dtype that a call names; None where it names none."""
    if (dtype := keyword(node, "dtype")) is not None:
        return name_of_dtype(source, dtype, depth=depth)
    path = source.path(node.func)
    if path.startswith("torch.") and path.removeprefix("torch.") in _MAKERS:
        return "wide"  # torch's default dtype
    if path in ("torch.arange", "torch.tensor", "torch.as_tensor"):
        numbers = [arg.value for arg in ast.walk(node) if isinstance(arg, ast.Constant)]
        if any(isinstance(number, float) for number in numbers):
            return "wide"
        return "integer" if path == "torch.arange" else ""  # arange of sizes; a tensor of names may hold anything
    if not isinstance(node.func, ast.Attribute):
        return None
    name, owner = node.func.attr, node.func.value
    if name in _CASTS and not node.args:
        return _CASTS[name]
    if name in ("to", "type"):
        for arg in node.args:
            if kind := name_of_dtype(source, arg, depth=depth):
                return kind
        return read_dtype(source, owner, depth=depth + 1) if _names_device(node) else ""
    if name in _SHAPES:
        return read_dtype(source, owner, depth=depth + 1)
    if name in ("type_as", "expand_as", "view_as") and node.args:
        return read_dtype(source, node.args[0] if name == "type_as" else owner, depth=depth + 1)
    return None


def _names_device(node: ast.Call) -> bool:
    """`x.to(device)`, `x.to(y.device)`, `x.to("cuda")`: the dtype stays."""
    if len(node.args) != 1:
        return not node.args
    arg = node.args[0]
    if isinstance(arg, ast.Constant):
        return isinstance(arg.value, str)
    return "device" in last_name(arg).lower()


def name_of_dtype(source: SourceTree, node: ast.expr, *, depth: int = 0) -> str:
    """What a dtype argument says: `torch.float16` is 'half', `x.dtype` is that of x, anything else ''."""
    path = source.path(node)
    if path.startswith("torch."):
        return _DTYPES.get(path.removeprefix("torch."), "")
    if isinstance(node, ast.Attribute) and node.attr == "dtype":
        return read_dtype(source, node.value, depth=depth + 1)
    if isinstance(node, ast.Call) and source.path(node.func) == "torch.promote_types":  # FP32 at least, beside FP32
        return "wide" if any(name_of_dtype(source, one, depth=depth + 1) == "wide" for one in node.args) else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):  # compute_dtype(x.dtype): FP32 for some, if so
        made = [one for one in source.tree.body if isinstance(one, ast.FunctionDef) and one.name == node.func.id]
        inside = (source.path(part).removeprefix("torch.") for one in made for part in ast.walk(one))
        return "wide" if any(_DTYPES.get(name) == "wide" for name in inside) else ""
    if isinstance(node, ast.Name):
        if node.id in ("float", "int", "bool") and node.id not in source.aliases:
            return {"float": "wide"}.get(node.id, "integer")
        made = read_value(source, node)
        return name_of_dtype(source, made, depth=depth + 1) if made is not node and depth < _DEPTH else ""
    return ""


def _result_dtype(source: SourceTree, found: Operation, depth: int) -> str:
    if found.name in _LIKE:
        return read_dtype(source, found.operand, depth=depth + 1)
    if found.name in _INDICES:
        return "integer"
    if found.name in _PRODUCTS:
        return ""
    sides = [found.operand, *(found.args if isinstance(found.node, ast.BinOp) else found.args[:1])]
    if found.name == "where" and not found.is_method:
        sides = list(found.args)
    kinds = {read_dtype(source, side, depth=depth + 1) for side in sides if read_number(source, side) is None}
    if "wide" in kinds:  # FP32 and 16 bits give FP32
        return "wide"
    return kinds.pop() if len(kinds) == 1 else ""


def is_tensor(source: SourceTree, node: ast.expr, *, depth: int = 0) -> bool:
    """Whether the file shows that a value is a tensor."""
    if depth > _DEEP:
        return False
    known = source.answers.setdefault(is_tensor, {})
    if node not in known:
        known[node] = False  # a value that is made from itself shows nothing
        known[node] = _show_tensor(source, node, depth)
    return known[node]


def _show_tensor(source: SourceTree, node: ast.expr, depth: int) -> bool:
    if isinstance(node, ast.Call):
        path = source.path(node.func)
        if path.startswith("torch.") and not path.startswith(("torch.nn.Module", "torch.utils", "torch.optim")):
            last = path.rpartition(".")[2]
            return last[:1].islower() or last == "Tensor"
        if path:
            return False
        return source.operation(node) is not None
    if isinstance(node, ast.BinOp):
        return any(is_tensor(source, side, depth=depth + 1) for side in (node.left, node.right))
    if isinstance(node, ast.UnaryOp):
        return is_tensor(source, node.operand, depth=depth + 1)
    if isinstance(node, ast.Subscript):
        return is_tensor(source, node.value, depth=depth + 1)
    if isinstance(node, ast.Attribute):
        return node.attr in ("T", "mT", "data", "grad") and is_tensor(source, node.value, depth=depth + 1)
    if isinstance(node, ast.Name):
        values = reaching_values(source, node)
        if values and all(one is not None for one in values):
            return all(is_tensor(source, one, depth=depth + 1) for one in values if one is not None)
        return _is_annotated(source, node)
    return False


def _is_annotated(source: SourceTree, node: ast.Name) -> bool:
    """A parameter `x: torch.Tensor`."""
    function = source.function(node)
    arguments = getattr(function, "args", None)
    if not isinstance(arguments, ast.arguments) or not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if one.arg != node.id or one.annotation is None:
            continue
        return "Tensor" in ast.unparse(one.annotation)
    return False
