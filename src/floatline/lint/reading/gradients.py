"""Whether a gradient flows through an expression, as far as the file shows."""

from __future__ import annotations

import ast
from pathlib import PurePath

from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import last_name, read_once

_SWITCHES = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.inference_mode")
_WITHOUT = ("torch.set_grad_enabled", "torch.autograd.set_grad_enabled")
# Methods whose result no gradient flows through.
_ENDS = frozenset(
    """detach detach_ item tolist numpy long int bool argmax argmin argsort isnan isinf isfinite round floor ceil
    bucketize searchsorted allclose isclose one_hot""".split()  # noqa: SIM905
)
_PLAIN_FUNCTIONS = frozenset(("float", "int", "bool", "print", "round", "str", "repr", "range", "len"))
# What runs before training, or beside it.
_BESIDE = (
    "init_", "_init_", "reset_", "_reset_", "__init__", "__repr__", "extra_repr", "post_process", "postprocess",
    "_postprocess", "preprocess", "_preprocess", "plot", "_plot", "log_", "eval", "_eval", "validate", "validation_",
    "test", "predict", "infer", "inference", "generate", "visual", "draw", "show_", "nms", "beam_search", "assign",
    "collate", "load_", "save_", "export", "compute_metric", "update_metric", "benchmark",
)  # fmt: skip
_BASES_WITHOUT = (
    "Optimizer", "LRScheduler", "Dataset", "Metric", "BaseTransform", "Evaluator", "Sampler", "SchedulerMixin",
    "Pipeline", "Tracker", "Assigner", "Matcher", "MatchCost", "BeamSearch", "Callback",
)  # fmt: skip
# Files that train nothing, by the words of their names and of the two folders around them.
_PLACES_BESIDE = frozenset(
    """test tests metric metrics evaluate evaluation evaluator evaluators eval infer inference pipeline pipelines
    scheduler schedulers sampler samplers preprocess preprocessing postprocess postprocessing visualization visualize
    costs viz visualizer renderer env envs explain explainer plot plotting tracker trackers assigner assigners matcher
    matchers demo demos export webui gui benchmark
    benchmarks conftest""".split()  # noqa: SIM905
)
_PLACES_TRAINED = ("train", "loss", "model", "finetune", "criterion")
_PREPROCESSING = (
    "TorchvisionBackend",
    "PilBackend",
    "Processor",
    "ProcessorMixin",
    "ImageProcessorFast",
    "FeatureExtractor",
    "FeatureExtractionMixin",
)
_TESTS = ("torch.testing", "unittest", "pytest")
_RANDOM = frozenset(f"torch.{name}" for name in ("rand", "randn", "randint", "arange", "linspace"))
_CUTS = ("detach", "item", "numpy")
_DEPTH = 4  # operations between a value and its detach()
# Functions behind these stand for an operation of torch: autograd does not look into them.
_BELOW_AUTOGRAD = ("torch._decomp", "torch._prims", "torch._refs", "torch._inductor", "torch.library", "torch._ops")


def has_gradient(source: Source, node: ast.expr, *, surely: bool = True) -> bool:
    """Whether nothing around an expression stops its gradient.

    Stops are `no_grad` and `inference_mode` around it, `.detach()`, `.item()` or a comparison of its result, and code
    that only makes weights, steps an optimizer, loads data, tests or measures.

    Args:
        source: The file.
        node: The expression.
        surely: Whether the file must show a module or a loss.
    """
    if _lies_beside(source):
        return False
    if source.function(node) is not source.tree and (
        _tests_or_prepares(source) or (surely and not is_training_code(source))
    ):
        return False
    below: ast.AST = node
    is_value = True  # still in the expression, not yet at its statement
    for above in source.ancestors(node):
        if is_value and _is_end(source, above, below):
            return False
        if isinstance(above, ast.stmt):
            is_value = False
        if isinstance(above, (ast.With, ast.AsyncWith)) and any(
            _is_switch(source, one.context_expr) for one in above.items
        ):
            return False
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_trained(source, above):
            return False
        if isinstance(above, ast.ClassDef) and not _can_train(source, above):
            return False
        below = above
    if _is_detached(source, node) or _is_only_looked_at(source, node):
        return False
    return not _is_called_without(source, source.function(node))


@read_once
def _is_called_without(source: Source, function: ast.AST) -> bool:
    """Whether every call of a plain function in the file stands where no gradient flows."""
    if not isinstance(function, ast.FunctionDef) or function not in source.tree.body:
        return False
    calls = source.calls.get(function.name, ())
    return bool(calls) and all(any(_stops(source, above) for above in source.ancestors(call)) for call in calls)


def _stops(source: Source, above: ast.AST) -> bool:
    if isinstance(above, (ast.With, ast.AsyncWith)):
        return any(_is_switch(source, one.context_expr) for one in above.items)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(above, functions) and any(_is_switch(source, one) for one in above.decorator_list)


@read_once
def _lies_beside(source: Source) -> bool:
    """Whether a file tests, measures, samples or shows, by its name."""
    path = PurePath(source.file)
    if {"test", "tests"} & {part.lower() for part in path.parts[:-1]}:
        return True
    if any(word in path.stem.lower() for word in _PLACES_TRAINED):
        return False
    words = {*(part.lower() for part in path.parts[-3:-1]), *path.stem.lower().replace("-", "_").split("_")}
    return not words.isdisjoint(_PLACES_BESIDE)


@read_once
def is_training_code(source: Source) -> bool:
    """Whether the file holds modules or a loss, and neither tests nor what prepares data."""
    return not _tests_or_prepares(source) and (
        "loss" in source.text.lower()
        or ".backward(" in source.text
        or any(source.is_module_class(one) for one in source.classes.values())
    )


@read_once
def _tests_or_prepares(source: Source) -> bool:
    bases = (base for one in source.classes.values() for base in one.bases)
    return any(path.startswith(_TESTS) for path in source.aliases.values()) or any(
        _ending(source, base).endswith(_PREPROCESSING) for base in bases
    )


def is_beside_training(source: Source, node: ast.AST) -> bool:
    """Whether an expression only makes weights, prepares data, tests or reports."""
    if source.function(node) is source.tree:
        return False
    if _tests_or_prepares(source):
        return True
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(above, functions) and above.name.startswith(_BESIDE) for above in source.ancestors(node))


def _ending(source: Source, base: ast.expr) -> str:
    return source.path(base) or last_name(base)


def _is_only_looked_at(source: Source, node: ast.expr) -> bool:
    """Whether its name is used, and only where no gradient flows."""
    statement = source.parents.get(node)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    name, function = statement.targets[0].id, source.function(node)
    uses = [
        part
        for part in ast.walk(function)
        if isinstance(part, ast.Name)
        and part.id == name
        and isinstance(part.ctx, ast.Load)
        and part.lineno > statement.lineno
    ]
    return bool(uses) and all(_ends(source, use) for use in uses)


def _ends(source: Source, node: ast.AST) -> bool:
    below = node
    for above in source.ancestors(node):
        if isinstance(above, ast.stmt):
            return False
        if _is_end(source, above, below):
            return True
        below = above
    return False


def _is_end(source: Source, above: ast.AST, below: ast.AST) -> bool:
    if isinstance(above, ast.Attribute):
        return above.attr in _ENDS or above.attr in ("data", "shape", "dtype", "device")
    if isinstance(above, (ast.Compare, ast.JoinedStr)):
        return True
    if isinstance(above, ast.Call) and below is not above.func:
        function = above.func
        if isinstance(function, ast.Name):
            return function.id in _PLAIN_FUNCTIONS
        if isinstance(function, ast.Attribute):
            if function.attr in _ENDS:
                return True
            return function.attr in ("copy_", "log", "info", "debug") and not source.path(function)
    return False


def _is_switch(source: Source, node: ast.expr) -> bool:
    """`torch.no_grad()`, `@torch.no_grad` and `torch.set_grad_enabled(False)`."""
    if source.path(node) in _SWITCHES:
        return True
    if not isinstance(node, ast.Call):
        return False
    path = source.path(node.func)
    if path in _SWITCHES:
        return True
    return (
        path in _WITHOUT and bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value is False
    )


def _is_trained(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if function.name.startswith(_BESIDE):
        return False
    for one in function.decorator_list:
        if source.path(one.func if isinstance(one, ast.Call) else one).startswith(_BELOW_AUTOGRAD):
            return False
    return not any(_is_switch(source, one) for one in function.decorator_list)


def _can_train(source: Source, node: ast.ClassDef) -> bool:
    if any("Trainer" in last_name(base) for base in node.bases):
        return True
    # A cost is what pairs are matched by, unless it is a module.
    if node.name.endswith(_BASES_WITHOUT) or (node.name.endswith("Cost") and not source.is_module_class(node)):
        return False
    functions = ("torch.autograd.Function", "torch.autograd.function.Function")
    paths = [_ending(source, base) for base in node.bases]
    return not any(path.endswith(_BASES_WITHOUT) or path in functions for path in paths)


def _is_detached(source: Source, node: ast.expr, depth: int = 0) -> bool:
    """Whether the expression, or what its names were made from, is cut off: every tensor in it is detached."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in ("detach", "data"):
            return True
        if isinstance(part, ast.Name):
            made = source.value(part)
            if isinstance(made, ast.Attribute) and made.attr == "data":
                return True
            if made is part or not isinstance(made, ast.Call):
                continue
            if any(isinstance(one, ast.Attribute) and one.attr in _CUTS for one in ast.walk(made.func)):
                return True
            if source.path(made.func) in _RANDOM:
                return True
            inner = _operand(source, made) if depth < _DEPTH else None
            if isinstance(inner, ast.Name) and _is_detached(source, inner, depth + 1):
                return True
    return False


def _operand(source: Source, node: ast.expr) -> ast.expr:
    """x of `torch.log(x.view(-1)).sum(1)`: what a chain of operations starts from."""
    while isinstance(node, ast.Call) and (found := source.operation(node)) is not None:
        node = found.operand
    return node
