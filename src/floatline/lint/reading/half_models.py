"""Models that a file puts into FP16 and hands to an optimizer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from floatline.lint.reading.branches import Known, judge, learn
from floatline.lint.reading.loop import read_training
from floatline.lint.reading.loop_events import dotted
from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import given_dtypes, keyword, parameters
from floatline.lint.reading.values import assignments

_HALF = ("torch.float16", "torch.half")
_WIDE = ("torch.float32", "torch.float", "torch.float64")
# They give the trainable parameters FP32 by themselves.
_WIDENS = ("get_peft_model", "prepare_model_for_kbit_training", "cast_training_params")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class HalfModel:
    """A model in FP16, and the optimizer that trains it.

    Args:
        name: The model.
        cast: What puts it into FP16.
        optimizer: The name of the optimizer.
        call: What makes the optimizer.
        is_frozen_in_part: Whether only some of its parameters are trained.
    """

    name: str
    cast: ast.Call
    optimizer: str
    call: ast.Call
    is_frozen_in_part: bool


def find_half_models(source: Source, known: Known | None = None) -> Iterator[HalfModel]:
    """Models that are cast to FP16 and then trained as they are.

    Args:
        source: The file.
        known: Tests that hold where the question matters; a cast under another `if` does not count then.
    """
    optimizers = read_training(source).optimizers
    if not optimizers:
        return
    casts = list(_find_casts(source))
    for name, made in optimizers.items():
        models, filtered = _models_in(source, made.call)
        for model, cast in casts:
            if model not in models or source.function(cast) is not made.function or cast.lineno > made.call.lineno:
                continue
            if known is not None and not _surely_runs(source, cast, known):
                continue
            if _excludes(source, cast, made.call) or _is_wrapped(source, name, made.call):
                continue
            if not _is_widened(source, cast, made.call):
                frozen = filtered or _freezes(made.function)
                yield HalfModel(model, cast, name, made.call, frozen)
                break


def _find_casts(source: Source) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        is_half = any(source.path(arg) in _HALF for arg in given_dtypes(node))
        if (name == "half" and not node.args) or (name in ("to", "from_pretrained", "from_config") and is_half):
            statement = source.statement(node)
            if isinstance(statement, ast.Assign) and _is_outermost(source, node):
                yield dotted(statement.targets[0]), node
            elif name in ("half", "to") and isinstance(statement, ast.Expr):
                yield _root(node.func.value), node


def _is_outermost(source: Source, node: ast.Call) -> bool:
    """Whether the call makes what is assigned; `.cuda()`, `.to(device)` and adapters of its format may follow."""
    for above in source.ancestors(node):
        if isinstance(above, ast.Assign):
            return True
        if isinstance(above, ast.Call) and source.call_name(above) == "get_peft_model" and _keeps_dtype(above):
            continue
        if isinstance(above, ast.Call) and isinstance(above.func, ast.Attribute):
            if above.func.attr not in ("cuda", "to", "train", "requires_grad_", "eval"):
                return False
        elif not isinstance(above, ast.Attribute):
            return False
    return False


def _root(node: ast.expr) -> str:
    """`model` of `model.cuda().half()`; `self.model` of `self.model.half()`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return dotted(node)


def _models_in(source: Source, call: ast.Call) -> tuple[set[str], bool]:
    """Models whose parameters an optimizer is given, and whether they are chosen by `requires_grad`."""
    if not call.args and not call.keywords:
        return set(), False
    first = call.args[0] if call.args else call.keywords[0].value
    parts = [first, *(source.value(one) for one in ast.walk(first) if isinstance(one, ast.Name))]
    models: set[str] = set()
    filtered = False
    for part in parts:
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters"):
                models.add(dotted(node.value))
            filtered = filtered or (isinstance(node, ast.Attribute) and node.attr == "requires_grad")
    return models - {""}, filtered


def _surely_runs(source: Source, node: ast.AST, known: Known) -> bool:
    """Whether every `if` around a node holds, given what is known."""
    return all(judge(test, known) is side for test, side in _conditions(source, node))


def _excludes(source: Source, cast: ast.Call, call: ast.Call) -> bool:
    """Whether the optimizer is made only where the cast is not: in the `else` of the same test."""
    holds: Known = {}
    for test, side in _conditions(source, cast):
        holds.update(learn(test, side))
    return any(judge(test, holds) is (not side) for test, side in _conditions(source, call))


def _conditions(source: Source, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The tests of the `if`s around a node, and how they came out."""
    inner: ast.AST = node
    for above in source.ancestors(node):
        if isinstance(above, _FUNCTIONS):
            return
        if isinstance(above, ast.If) and inner is not above.test:
            yield above.test, any(one is inner for one in above.body)
        inner = above


def _is_wrapped(source: Source, name: str, call: ast.Call) -> bool:
    """Whether something else takes the optimizer's name later, such as FP16_Optimizer(optimizer)."""
    known = assignments(source, source.function(call)).get(name, [])
    return any(at.lineno > call.lineno for at, _ in known)


def _is_widened(source: Source, cast: ast.Call, end: ast.Call) -> bool:
    """Whether something between gives what is trained FP32 again, on every way."""
    function = source.function(cast)
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not cast.lineno < node.lineno <= end.lineno:
            continue
        if source.call_name(node) in _WIDENS and not _keeps_dtype(node):
            return True
        if not isinstance(node.func, ast.Attribute) or _is_switched(source, node, function):
            continue
        wide = node.func.attr == "float" or (
            node.func.attr == "to"
            and any(source.path(arg) in _WIDE for arg in (*node.args, *(w.value for w in node.keywords)))
        )
        if wide:
            return True
    return False


def _keeps_dtype(call: ast.Call) -> bool:
    """Whether PEFT is told to leave adapters in the format of their base."""
    kept = keyword(call, "autocast_adapter_dtype")
    return isinstance(kept, ast.Constant) and kept.value is False


def _is_switched(source: Source, node: ast.AST, function: ast.AST) -> bool:
    """Whether it runs only where an argument of the function says so."""
    names = parameters(function)
    for above in source.ancestors(node):
        if above is function:
            return False
        if isinstance(above, ast.If) and any(
            isinstance(one, ast.Name) and one.id in names for one in ast.walk(above.test)
        ):
            return True
    return False


def _freezes(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requires_grad_":
            return True
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and target.attr == "requires_grad" for target in node.targets
        ):
            return True
    return False
