"""Numbers that may reach an expression from anywhere in its file, and tensors that a module owns.

`Source.number` answers where there is one answer. Guard constants seldom have one: they come as the default of a
parameter, from a caller, or by way of `self.eps`. Here every number counts that the file lets through.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from floatline.lint.cast_modules import is_in_cast_module
from floatline.lint.source import Source
from floatline.lint.values import assignments, reaching_values

_DEPTH = 6  # from a constant over calls and attributes to its use
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FARTHEST = 300  # expressions that are looked at on the way to one value
_WIDE = frozenset(("torch.float32", "torch.float64", "torch.float", "torch.double"))
_WIDE_MAKERS = frozenset(("linspace", "logspace", "eye", "rand", "randn", "hann_window", "from_numpy"))
# Code that prepares data runs in FP32, before a model sees its numbers.
_PREPARATION = (
    "FeatureExtractor", "ImageProcessor", "ImageProcessorFast", "ImageProcessingMixin", "ProcessorMixin",
    "VideoProcessor", "Dataset", "DataLoader", "Tokenizer", "TorchvisionBackend",
)  # fmt: skip


@dataclass(frozen=True)
class Reached:
    """A number and the expression that it is written in."""

    number: float
    node: ast.expr

    @property
    def is_float(self) -> bool:
        """Whether it is written as one: 1e9 is, 151643 is an id as well as a number."""
        return any(isinstance(one, ast.Constant) and isinstance(one.value, float) for one in ast.walk(self.node))


def reached_numbers(source: Source, node: ast.expr, *, depth: int = 0) -> list[Reached]:
    """Every number that the file shows to reach an expression; empty where it shows none.

    Defaults of parameters, arguments of calls in the same file, both sides of an `if`, constants of a class and
    attributes that `self` was given all count.
    """
    number = source.number(node)
    if number is not None:
        return [Reached(number, node)]
    if depth > _DEPTH:
        return []
    if isinstance(node, ast.IfExp):
        if _mentions_dtype(node.test):  # it chooses by the dtype: what is too large for one is not for it
            return []
        return [one for side in (node.body, node.orelse) for one in reached_numbers(source, side, depth=depth + 1)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return [Reached(-one.number, one.node) for one in reached_numbers(source, node.operand, depth=depth + 1)]
    if isinstance(node, ast.Attribute):
        return _of_attribute(source, node, depth)
    if isinstance(node, ast.Name):
        return _of_name(source, node, depth)
    return []


def _of_name(source: Source, node: ast.Name, depth: int) -> list[Reached]:
    values = reaching_values(source, node)
    found = [one for value in values if value is not None for one in reached_numbers(source, value, depth=depth + 1)]
    function = source.function(node)
    if values and not any(value is None for value in values):
        return found
    while not isinstance(function, ast.Module):  # a name of a closure belongs to a function further out
        if node.id in _names_of(function):
            return found + _of_parameter(source, function, node.id, depth)
        function = source.function(function)
    return found


def _of_attribute(source: Source, node: ast.Attribute, depth: int) -> list[Reached]:
    return [
        one
        for value in owned_values(source, node)
        if not (isinstance(value, ast.Attribute) and value.attr == node.attr and ast.dump(value) == ast.dump(node))
        for one in reached_numbers(source, value, depth=depth + 1)
    ]


def owned_values(source: Source, node: ast.expr) -> list[ast.expr]:
    """What `self.name` is given anywhere in its class, or in a class of the file that it stands on."""
    if (
        not isinstance(node, ast.Attribute)
        or not isinstance(node.value, ast.Name)
        or node.value.id not in ("self", "cls")
    ):
        return []
    owner, found = source.class_of(node), list[ast.expr]()
    seen: set[str] = set()
    while owner is not None and owner.name not in seen:
        seen.add(owner.name)
        found += _attributes(source, owner).get(node.attr, [])
        bases = [base.id for base in owner.bases if isinstance(base, ast.Name)]
        owner = next((source.classes[base] for base in bases if base in source.classes), None)
    return found


def _attributes(source: Source, owner: ast.ClassDef) -> dict[str, list[ast.expr]]:
    cache: dict[int, dict[str, list[ast.expr]]] = source.__dict__.setdefault("_attributes", {})
    if id(owner) in cache:
        return cache[id(owner)]
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(owner):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for one, value in _pairs(target, node.value):
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
                    found.setdefault(one.attr, []).append(value)
                elif isinstance(one, ast.Name) and node in owner.body:
                    found.setdefault(one.id, []).append(value)
    cache[id(owner)] = found
    return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """`self.a, self.b = 1, 2` gives each its own."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def _names_of(function: _Function) -> list[str]:
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _of_parameter(source: Source, function: _Function, name: str, depth: int) -> list[Reached]:
    given = _given_to(source, function, name)
    return [one for value in given for one in reached_numbers(source, value, depth=depth + 1)]


def _given_to(source: Source, function: _Function, name: str) -> list[ast.expr]:
    """What a parameter is given: its default, and the arguments of calls in the file."""
    arguments = function.args
    places = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    given: list[ast.expr] = []
    defaults = dict(zip(reversed(places), reversed(arguments.defaults), strict=False))
    defaults |= {
        one.arg: value
        for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value is not None
    }
    if name in defaults:
        given.append(defaults[name])
    if isinstance(function, ast.Lambda) or function.name == "forward":  # every module has one: calls do not tell whose
        return given
    owner = source.parents.get(function)
    called = owner.name if function.name == "__init__" and isinstance(owner, ast.ClassDef) else function.name
    skipped = 1 if isinstance(owner, ast.ClassDef) and places[:1] == ["self"] else 0
    for call in _calls(source).get(called, ()):
        if any(isinstance(arg, ast.Starred) for arg in call.args):
            continue
        named = next((word.value for word in call.keywords if word.arg == name), None)
        place = places.index(name) - skipped if name in places else -1
        if named is not None:
            given.append(named)
        elif 0 <= place < len(call.args):
            given.append(call.args[place])
    return given


def _calls(source: Source) -> dict[str, list[ast.Call]]:
    """The calls of the file by the last name of what is called."""
    cache: dict[str, list[ast.Call]] | None = source.__dict__.get("_calls")
    if cache is None:
        cache = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and (name := source.call_name(node)):
                cache.setdefault(name, []).append(node)
        source.__dict__["_calls"] = cache
    return cache


def may_be_tensor(source: Source, node: ast.expr) -> bool:
    """Whether the file shows a tensor: as `Source.is_tensor` does, and also what a module's `forward` is given."""
    if source.is_tensor(node):
        return True
    if isinstance(node, ast.BinOp):
        return may_be_tensor(source, node.left) or may_be_tensor(source, node.right)
    if isinstance(node, (ast.UnaryOp, ast.Subscript)):
        return may_be_tensor(source, node.operand if isinstance(node, ast.UnaryOp) else node.value)
    if isinstance(node, ast.Attribute):
        return is_parameter(source, node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not source.path(node.func):
        return node.func.attr in ("sum", "mean", "prod", "var", "std", "max", "min") and may_be_tensor(
            source, node.func.value
        )
    if not isinstance(node, ast.Name):
        return False
    values = reaching_values(source, node)
    if values:
        return any(value is not None and value is not node and source.is_tensor(value) for value in values)
    function = source.function(node)
    if not isinstance(function, ast.FunctionDef) or function.name != "forward":
        return False
    required = function.args.args[: len(function.args.args) - len(function.args.defaults)]
    if not any(one.arg == node.id and one.annotation is None for one in required):
        return False
    return source.is_module_class(source.class_of(function))


def is_parameter(source: Source, node: ast.expr) -> bool:
    """Whether `self.name` is a parameter of its module."""
    return any(
        source.is_call_to(value, "torch.nn.Parameter", "torch.nn.parameter.Parameter")
        for value in owned_values(source, node)
    )


def prepares_data(source: Source, node: ast.AST) -> bool:
    """Whether a node stands in a class that prepares data, by the class that it stands on."""
    owner = source.class_of(node)
    seen: set[str] = set()
    while owner is not None and owner.name not in seen:
        seen.add(owner.name)
        names = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in owner.bases]
        if any(name.endswith(_PREPARATION) for name in (*names, owner.name)):
            return True
        owner = next((source.classes[name] for name in names if name in source.classes), None)
    return False


def is_cast_around(source: Source, node: ast.AST) -> bool:
    """Whether a decorator casts what the function around a node is given."""
    function = source.function(node)
    for one in getattr(function, "decorator_list", ()):
        text = ast.unparse(one)
        if "opmath" in text or "type_promotion" in text or ("cast_inputs" in text and "float32" in text):
            return True
    return False


def stays_silent(source: Source, node: ast.AST, *values: ast.expr) -> bool:
    """Whether the file shows that a place never sees 16 bits.

    It is FP32 or whole numbers, it prepares data, a decorator casts, an `if` around it asks for the dtype, its module
    is cast to FP32, or it is a reference that tests compare with, which is run in FP64.
    """
    if any(source.dtype(value) in ("wide", "integer") for value in values):
        return True
    if prepares_data(source, node) or is_cast_around(source, node) or _asks_for_dtype(source, node):
        return True
    if _is_reference(source, node) or is_in_cast_module(source, node):
        return True
    return any(shows_wide(source, value) for value in values)


def _is_reference(source: Source, node: ast.AST) -> bool:
    """Whether a node stands in a formula that tests compare with: `def loss_reference(…)`, `reference_fn=lambda …`."""
    for above in source.ancestors(node):
        name = above.name if isinstance(above, ast.FunctionDef) else above.arg if isinstance(above, ast.keyword) else ""
        if name and "reference" in name.split("_"):
            return True
    return False


def _asks_for_dtype(source: Source, node: ast.AST) -> bool:
    for above in source.ancestors(node):
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if isinstance(above, (ast.If, ast.IfExp)) and _mentions_dtype(above.test):
            return True
    return False


def _mentions_dtype(test: ast.expr) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr in ("dtype", "float16", "float32") for one in ast.walk(test))


def shows_wide(source: Source, node: ast.expr) -> bool:
    """Whether FP32 enters anywhere on the way to a value: by a cast, by what makes FP32, or by a name that says so.

    FP32 and 16 bits give FP32, so one such operand is enough, as long as nothing casts back.
    """
    return any(_is_wide(source, one) for one in made_of(source, node))


def _is_wide(source: Source, node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id.lower().endswith(("32", "64"))
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("float", "double") and not node.args:
        return True
    told = [*node.args, *(word.value for word in node.keywords if word.arg == "dtype")]
    if any(source.path(one) in _WIDE for one in told):
        return True
    path = source.path(node.func)
    return path.startswith("torch.") and path[6:] in _WIDE_MAKERS and all(word.arg != "dtype" for word in node.keywords)


def follows_dtype(source: Source, node: ast.expr) -> bool:
    """Whether a value takes the dtype of another: `mask.to(x.dtype)`, `torch.zeros_like(x)`, `mask.half()`."""
    for one in made_of(source, node, always=False):
        if not isinstance(one, ast.Call):
            continue
        name = source.call_name(one)
        if name.endswith("_like") or name.startswith("new_") or name in ("half", "type_as") or _casts_back(source, one):
            return True
        if any(word.arg == "dtype" and not source.path(word.value) for word in one.keywords):
            return True
    return False


def _casts_back(source: Source, node: ast.Call) -> bool:
    """`y.to(x.dtype)`, `y.to(dtype)`, `y.half()`: what y was before does not matter any more."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name in ("half", "bfloat16", "type_as"):
        return True
    if name not in ("to", "type"):
        return False
    told = [*node.args, *(word.value for word in node.keywords if word.arg == "dtype")]
    for one in told:
        last = one.attr if isinstance(one, ast.Attribute) else one.id if isinstance(one, ast.Name) else ""
        if "dtype" in last or source.path(one) in ("torch.float16", "torch.half", "torch.bfloat16"):
            return True
    return False


def made_of(source: Source, node: ast.expr, *, always: bool = True) -> Iterator[ast.expr]:
    """The expressions that a value is made of, through names, tuples and arguments of calls in the file.

    Args:
        source: The file.
        node: The value.
        always: Whether assignments under an `if` without an `else` are left out.
    """
    waiting: list[tuple[ast.expr, int]] = [(node, 0)]
    seen: set[int] = set()
    while waiting:
        one, depth = waiting.pop()
        if id(one) in seen or len(seen) > _FARTHEST:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, ast.Call) and _casts_back(source, one):
            continue
        if isinstance(one, ast.Attribute) and one.attr in ("shape", "dtype", "device", "ndim"):
            continue
        if isinstance(one, (ast.Lambda, ast.Compare)):
            continue
        if isinstance(one, ast.Subscript):  # what picks is not what is picked
            waiting.append((one.value, depth))
            continue
        waiting += [(child, depth) for child in ast.iter_child_nodes(one) if isinstance(child, ast.expr)]
        if isinstance(one, ast.Call):
            waiting += [(word.value, depth) for word in one.keywords]
        if isinstance(one, ast.Name) and depth < _DEPTH:
            waiting += [(value, depth + 1) for value in _sources_of(source, one, always=always)]


def _sources_of(source: Source, node: ast.Name, *, always: bool) -> list[ast.expr]:
    function = source.function(node)
    found: list[ast.expr] = []
    for statement, value in assignments(source, function).get(node.id, ()):
        if statement.lineno > node.lineno or (always and _is_optional(source, statement, node)):
            continue
        if value is not None:
            found.append(value)
        elif isinstance(statement, (ast.Assign, ast.AugAssign)) and statement.lineno < node.lineno:
            found.append(statement.value)
    if not found and not isinstance(function, ast.Module) and node.id in _names_of(function):
        found = [value for value in _given_to(source, function, node.id) if not isinstance(value, ast.Constant)]
    return found


def _is_optional(source: Source, statement: ast.stmt, node: ast.AST) -> bool:
    """Whether a statement stands under an `if` without an `else` that does not hold the node as well."""
    around = {id(above) for above in source.ancestors(node)}
    for above in source.ancestors(statement):
        if id(above) in around:
            return False
        if isinstance(above, ast.If) and not above.orelse:
            return True
    return False


def depends_on_test(source: Source, node: ast.AST, value: ast.expr) -> bool:
    """Whether an `if` around a node compares the value itself: `if norm > 0:` guards what is divided by norm."""
    spelled = ast.dump(value)
    for above in source.ancestors(node):
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if isinstance(above, (ast.If, ast.IfExp)):
            for one in ast.walk(above.test):
                if isinstance(one, ast.Compare) and any(
                    ast.dump(part) == spelled for part in (one.left, *one.comparators)
                ):
                    return True
    return False
