"""Numbers that may reach an expression from anywhere in its file, and tensors that a module owns.

`Source.number` answers where there is one answer. Guard constants seldom have one: they come as the default of a
parameter, from a caller, or by way of `self.eps`. Here every number counts that the file lets through.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import keyword, parameters, read_once
from floatline.lint.reading.values import mentions_dtype, reaching_values

ZERO_IN_FP16 = 2.0**-25  # FP16 rounds this and everything below to 0
# What torch's optimizers add to their denominators where nothing is said.
DEFAULT_EPS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"), 1e-8),
    "Adagrad": 1e-10,
}
LARGEST_FP32 = (2.0 - 2.0**-23) * 2.0**127
_MOST_SUMS = 16
_DEPTH = 6  # from a constant over calls and attributes to its use
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


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
    return _reached(source, node, depth)


@read_once
def _reached(source: Source, node: ast.expr, depth: int) -> list[Reached]:
    """As above, each once and kept: a function that calls itself in many places would be walked in every order."""
    return list(dict.fromkeys(_look_for_numbers(source, node, depth)))


def _look_for_numbers(source: Source, node: ast.expr, depth: int) -> list[Reached]:
    number = source.number(node)
    if number is not None:
        return [Reached(number, node)]
    if depth > _DEPTH:
        return []
    if isinstance(node, ast.IfExp):
        if mentions_dtype(node.test):  # it chooses by the dtype: what is too large for one is not for it
            return []
        return [one for side in (node.body, node.orelse) for one in reached_numbers(source, side, depth=depth + 1)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return [Reached(-one.number, one.node) for one in reached_numbers(source, node.operand, depth=depth + 1)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return _of_sum(source, node, depth)
    if isinstance(node, ast.Attribute):
        return _of_finfo(source, node) or _of_attribute(source, node, depth)
    if isinstance(node, ast.Name):
        return _of_name(source, node, depth)
    return []


def _of_sum(source: Source, node: ast.BinOp, depth: int) -> list[Reached]:
    """`1.0 - self.eps`, of every number that reaches its sides; of many numbers none."""
    lefts, rights = (reached_numbers(source, side, depth=depth + 1) for side in (node.left, node.right))
    if not lefts or not rights or len(lefts) * len(rights) > _MOST_SUMS:
        return []
    sign = 1.0 if isinstance(node.op, ast.Add) else -1.0
    return [Reached(left.number + sign * right.number, node) for left in lefts for right in rights]


def _of_finfo(source: Source, node: ast.Attribute) -> list[Reached]:
    """`torch.finfo(torch.float32).min`, which is beyond FP16 whatever it is written to."""
    made = source.value(node.value)
    if node.attr not in ("min", "max") or not source.is_call_to(made, "torch.finfo"):
        return []
    wide = isinstance(made, ast.Call) and made.args and source.path(made.args[0]) in ("torch.float32", "torch.float")
    return [Reached(LARGEST_FP32 if node.attr == "max" else -LARGEST_FP32, node)] if wide else []


def reached_zero(source: Source, node: ast.expr) -> float | None:
    """The smallest number above 0 that reaches an expression, where FP16 rounds it to 0."""
    small = [one.number for one in reached_numbers(source, node) if 0 < one.number <= ZERO_IN_FP16]
    return min(small, default=None)


def _of_name(source: Source, node: ast.Name, depth: int) -> list[Reached]:
    values = reaching_values(source, node)
    found = [one for value in values if value is not None for one in reached_numbers(source, value, depth=depth + 1)]
    function = source.function(node)
    if values and not any(value is None for value in values):
        return found
    while not isinstance(function, ast.Module):  # a name of a closure belongs to a function further out
        if node.id in parameters(function):
            given = given_to(source, function, node.id)
            return found + [one for value in given for one in reached_numbers(source, value, depth=depth + 1)]
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


@read_once
def _attributes(source: Source, owner: ast.ClassDef) -> dict[str, list[ast.expr]]:
    """What a class gives its attributes."""
    del source
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
    return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """`self.a, self.b = 1, 2` gives each its own."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def given_to(source: Source, function: _Function, name: str) -> list[ast.expr]:
    """What a parameter is given: its default, and the arguments of calls in the file."""
    arguments = function.args
    places = parameters(function, only_by_place=True)
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
    for call in source.calls.get(called, ()):
        if any(isinstance(arg, ast.Starred) for arg in call.args):
            continue
        named = keyword(call, name)
        place = places.index(name) - skipped if name in places else -1
        if named is not None:
            given.append(named)
        elif 0 <= place < len(call.args):
            given.append(call.args[place])
    return given


def is_open_default(source: Source, node: ast.expr) -> bool:
    """Whether a number is the default of a parameter that no call in the file leaves at it: others decide."""
    function = source.function(node)
    if not isinstance(node, ast.Name) or isinstance(function, (ast.Module, ast.Lambda)):
        return False
    if function.name in ("forward", "__init__") or node.id not in parameters(function) or reaching_values(source, node):
        return False
    calls = source.calls.get(function.name, ())
    return len(given_to(source, function, node.id)) > len(calls)


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
