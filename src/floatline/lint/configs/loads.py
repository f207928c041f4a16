"""Where a model that is trained comes from: a checkpoint that the file loads, or a function of another file does."""

from __future__ import annotations

import ast

from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import last_name
from floatline.lint.reading.values import assignments

# The key of what such a function gives: it stands in another file, where nothing can be rewritten from here.
LOADED_ELSEWHERE = "loaded elsewhere"
_STAYS_ITSELF = frozenset(("to", "cuda", "train"))  # methods that give the model back
_HALF = ("float16", "half")


def find_load(source: Source, node: ast.expr) -> ast.Call | None:
    """The from_pretrained call that a model comes from, where nothing in between changes its dtype."""
    made = source.value(node)
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in _STAYS_ITSELF:
        if source.path(made.func) or any(read_torch_name(source, arg) for arg in made.args) or made.keywords:
            return None
        made = source.value(made.func.value)
    if not isinstance(made, ast.Call) or source.call_name(made) != "from_pretrained":
        return None
    return made if source.path(made.func).startswith("transformers.") else None


def read_torch_name(source: Source, node: ast.expr) -> str:
    """`float16` of `torch.float16`; '' of anything else."""
    path = source.path(node)
    return path.removeprefix("torch.") if path.startswith("torch.") and path.count(".") == 1 else ""


def find_half_load(source: Source, node: ast.expr) -> tuple[ast.Call, str] | None:
    """The call of an imported function that gives a model in FP16, and the text of the linted file that has it.

    `from models import load_model`, with `model = load_model(path)` or `model, tokenizer = load_model(path)`: each
    `return` of the function gives, at that place, what it loads with FP16 written out as its dtype.
    """
    call, place = _find_call(source, node)
    if call is None or not isinstance(call.func, ast.Name) or source.neighbours is None:
        return None
    module, name = source.imported.get(call.func.id, ("", ""))
    text = source.neighbours.read(source.file, module) if module else ""
    if f"def {name}(" not in text:
        return None
    try:
        other = Source(text, module)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = [one for one in other.tree.body if isinstance(one, ast.FunctionDef) and one.name == name]
    ends = [one.value for one in ast.walk(functions[0]) if isinstance(one, ast.Return)] if len(functions) == 1 else []
    return (call, text) if ends and all(_gives_half(other, end, place) for end in ends) else None


def _find_call(source: Source, node: ast.expr) -> tuple[ast.Call | None, int | None]:
    """The call that a name is given, and which of several values it is; None where that is the only one."""
    made = source.value(node)
    if isinstance(made, ast.Call):
        return made, None
    known = assignments(source, source.function(node)).get(node.id, []) if isinstance(node, ast.Name) else []
    at = known[0][0] if len(known) == 1 else None
    if not isinstance(at, ast.Assign) or not isinstance(at.value, ast.Call) or not isinstance(at.targets[0], ast.Tuple):
        return None, None
    names = [last_name(one) for one in at.targets[0].elts]
    return (at.value, names.index(last_name(node))) if last_name(node) in names else (None, None)


def _gives_half(source: Source, end: ast.expr | None, place: int | None) -> bool:
    """Whether what a function returns is a checkpoint in FP16."""
    if place is not None:
        end = end.elts[place] if isinstance(end, ast.Tuple) and len(end.elts) > place else None
    loaded = None if end is None else find_load(source, end)
    given = [word.value for word in loaded.keywords if word.arg in ("dtype", "torch_dtype")] if loaded else []
    return any(
        read_torch_name(source, one) in _HALF or (isinstance(one, ast.Constant) and one.value in _HALF) for one in given
    )
