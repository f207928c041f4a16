"""What shows that a place never sees 16 bits, so that rules are silent: casts, preparation of data, tests of dtypes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePath

from floatline.lint.reading.autocast_regions import is_in_disabled_region
from floatline.lint.reading.reaching import given_to
from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import given_dtypes, keyword, last_name, parameters, read_once
from floatline.lint.reading.under_autocast import shows_narrow
from floatline.lint.reading.values import assignments, mentions_dtype, name_of_dtype

_CASTS = frozenset(("float", "double"))


def is_in_cast_module(source: Source, node: ast.AST) -> bool:
    """Whether a node stands in a module that the file casts to FP32, or in one that only such modules are made of."""
    if ".float()" not in source.text and ".double()" not in source.text:
        return False
    owner = source.class_of(node)
    return owner is not None and owner.name in _cast_classes(source)


@read_once
def _cast_classes(source: Source) -> frozenset[str]:
    roots = {name for owner in source.classes.values() for name in _cast_in(source, owner)}
    if not roots:
        return frozenset()
    made_by = {name: _made_in(source, owner) for name, owner in source.classes.items()}
    found, waiting = set[str](), list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += made_by.get(name, ())
    # What another module is made of as well runs in the dtype of that one, too.
    while shared := {name for user, names in made_by.items() if user not in found for name in names & (found - roots)}:
        found -= shared
    return frozenset(found)


def _cast_in(source: Source, owner: ast.ClassDef) -> set[str]:
    """Classes of what a bare `self.name.float()` casts: a module is cast in place, a tensor is not."""
    attributes = {
        node.value.func.value.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in _CASTS
        and isinstance(node.value.func.value, ast.Attribute)
        and isinstance(node.value.func.value.value, ast.Name)
    }
    if not attributes:
        return set()
    return {
        name
        for node in ast.walk(owner)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Attribute) and target.attr in attributes for target in node.targets)
        and (name := _class_made(source, node.value))
    }


def _made_in(source: Source, owner: ast.ClassDef) -> set[str]:
    return {name for node in ast.walk(owner) if (name := _class_made(source, node))}


def _class_made(source: Source, node: ast.AST) -> str:
    """Part of `Part(…)` and of `Part.from_config(…)`, where Part is a class of the file."""
    if not isinstance(node, ast.Call):
        return ""
    made = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    return made.id if isinstance(made, ast.Name) and made.id in source.classes else ""


_DEPTH = 6  # from a constant over calls and attributes to its use
_FARTHEST = 300  # expressions that are looked at on the way to one value
_WIDE = frozenset(("torch.float32", "torch.float64", "torch.float", "torch.double"))
_WIDE_MAKERS = frozenset(("linspace", "logspace", "eye", "rand", "randn", "hann_window", "from_numpy"))
# What a distribution draws or weighs is FP32: autocast does not reach into it.
_DRAWN = frozenset(("rsample", "cdf", "icdf", "log_prob", "entropy"))
_COMPLEX = frozenset(("stft", "istft", "rfft", "fft", "fft2", "rfft2", "fftn", "view_as_complex", "complex", "polar"))
# Code that prepares data runs in FP32, before a model sees its numbers.
_PREPARATION = (
    "FeatureExtractor", "ImageProcessor", "ImageProcessorFast", "ImageProcessingMixin", "ProcessorMixin",
    "VideoProcessor", "Dataset", "DataLoader", "Tokenizer", "TorchvisionBackend",
    "LogitsProcessor", "LogitsWarper",  # generate() gives them FP32
)  # fmt: skip


_DATA_FOLDERS = frozenset(("dataset", "datasets", "dataloader", "dataloaders"))


def prepares_data(source: Source, node: ast.AST) -> bool:
    """Whether a node stands in a class that prepares data, by the class that it stands on, or in a folder of such."""
    if not _DATA_FOLDERS.isdisjoint(part.lower() for part in PurePath(source.file).parts[-3:-1]):
        return True
    owner = source.class_of(node)
    seen: set[str] = set()
    while owner is not None and owner.name not in seen:
        seen.add(owner.name)
        names = [last_name(base) for base in owner.bases]
        if any(name.endswith(_PREPARATION) for name in (*names, owner.name)):
            return True
        owner = next((source.classes[name] for name in names if name in source.classes), None)
    return False


def is_cast_around(source: Source, node: ast.AST) -> bool:
    """Whether a decorator casts what the function around a node is given."""
    function = source.function(node)
    for one in getattr(function, "decorator_list", ()):
        text = ast.unparse(one)
        if any(word in text for word in ("opmath", "type_promotion", "fp32", "float32", "full_precision")):
            return True
        if _casts_arguments(source, one.func if isinstance(one, ast.Call) else one):
            return True
    return False


@read_once
def _casts_arguments(source: Source, decorator: ast.expr) -> bool:
    """Whether a decorator of the file casts to FP32 what it then gives to the function that it stands on."""
    name = decorator.id if isinstance(decorator, ast.Name) else ""
    made = next((one for one in source.tree.body if isinstance(one, ast.FunctionDef) and one.name == name), None)
    if made is None:
        return False
    inside = [*ast.walk(made)]
    given = {arg.arg for one in inside if isinstance(one, ast.FunctionDef) for arg in one.args.args}
    calls = [one for one in inside if isinstance(one, ast.Call)]
    run = [one for one in calls if isinstance(one.func, ast.Name) and one.func.id in given]
    casts = [one for one in calls if _is_wide(source, one) and source.dtype(one) == "wide"]
    # What is cast behind the call is its result.
    return bool(run) and any(not any(one in run for one in made_of(source, cast.func)) for cast in casts)


def stays_silent(source: Source, node: ast.AST, *values: ast.expr) -> bool:
    """Whether the file shows that a place never sees 16 bits.

    It is FP32 or whole numbers, it prepares data, its function is for a CPU, a decorator casts, an `if` around it asks
    for the dtype, its module is cast to FP32, or it is a reference that tests compare with, which is run in FP64.
    """
    if any(source.dtype(value) in ("wide", "integer") for value in values):
        return True
    if prepares_data(source, node) or is_cast_around(source, node) or asks_for_dtype(source, node):
        return True
    if getattr(source.function(node), "name", "").endswith("_cpu"):  # autocast of a CPU is BF16
        return True
    if _is_reference(source, node) or is_in_cast_module(source, node) or is_in_disabled_region(source, node):
        return True
    return any(shows_wide(source, value) and not shows_narrow(source, value, surely=True) for value in values)


def _is_reference(source: Source, node: ast.AST) -> bool:
    """Whether a node stands in a formula that tests compare with: `def loss_reference(…)`, `reference_fn=lambda …`."""
    for above in source.ancestors(node):
        name = above.name if isinstance(above, ast.FunctionDef) else above.arg if isinstance(above, ast.keyword) else ""
        if name and "reference" in name.split("_"):
            return True
    return False


def asks_for_dtype(source: Source, node: ast.AST) -> bool:
    """Whether an `if` around a node in its function asks for a dtype, or for what a name holds that asked for one."""
    for above in source.ancestors(node):
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if isinstance(above, (ast.If, ast.IfExp)):
            names = [source.value(one) for one in ast.walk(above.test) if isinstance(one, ast.Name)]
            if any(mentions_dtype(one) for one in (above.test, *names)):
                return True
    return False


def shows_wide(source: Source, node: ast.expr) -> bool:
    """Whether FP32 enters anywhere on the way to a value: by a cast, by what makes FP32, or by a name that says so.

    FP32 and 16 bits give FP32, so one such operand is enough, as long as nothing casts back.
    """
    return any(_is_wide(source, one) for one in made_of(source, node))


def _is_wide(source: Source, node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id.lower().endswith(("32", "64"))
    if isinstance(node, ast.Attribute):
        return node.attr in ("real", "imag")  # of complex numbers, which autocast leaves alone
    if not isinstance(node, ast.Call):
        return False
    if source.path(node.func) in ("torch.finfo", "torch.iinfo"):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in _DRAWN and not source.path(node.func):
        return True
    if source.call_name(node) in _COMPLEX or any(_chooses_wide(source, one) for one in given_dtypes(node)):
        return True
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("float", "double") and not node.args:
        return True
    if any(source.path(one) in _WIDE for one in given_dtypes(node)):
        return True
    path = source.path(node.func)
    return path.startswith("torch.") and path[6:] in _WIDE_MAKERS and keyword(node, "dtype") is None


def _chooses_wide(source: Source, node: ast.expr) -> bool:
    """`compute_dtype(x.dtype)`, where a function of the file returns FP32 for some."""
    return isinstance(node, ast.Call) and name_of_dtype(source, node) == "wide"


def follows_dtype(source: Source, node: ast.expr) -> bool:
    """Whether a value takes the dtype of another: `mask.to(x.dtype)`, `torch.zeros_like(x)`, `mask.half()`."""
    for one in made_of(source, node, always=False):
        if not isinstance(one, ast.Call):
            continue
        name = source.call_name(one)
        if name.endswith("_like") or name.startswith("new_") or name in ("half", "type_as") or _casts_back(source, one):
            return True
        if (dtype := keyword(one, "dtype")) is not None and not source.path(dtype):
            return True
    return False


def _casts_back(source: Source, node: ast.Call) -> bool:
    """`y.to(x.dtype)`, `y.to(dtype)`, `y.half()`: what y was before does not matter any more."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name in ("half", "bfloat16", "type_as"):
        return True
    if name not in ("to", "type"):
        return False
    return any(
        "dtype" in last_name(one) or source.path(one) in ("torch.float16", "torch.half", "torch.bfloat16")
        for one in given_dtypes(node)
        if not _chooses_wide(source, one)
    )


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
    if not found and not isinstance(function, ast.Module) and node.id in parameters(function):
        found = [value for value in given_to(source, function, node.id) if not isinstance(value, ast.Constant)]
    return found


def _is_optional(source: Source, statement: ast.stmt, node: ast.AST) -> bool:
    """Whether a statement stands under an `if` without an `else` that does not hold the node as well."""
    around = {id(above) for above in source.ancestors(node)}
    for above in source.ancestors(statement):
        if id(above) in around:
            return False
        if isinstance(above, ast.If) and not above.orelse:
            return not mentions_dtype(above.test)  # `if x.dtype in (half, bfloat16): x = x.float()` casts all of them
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
