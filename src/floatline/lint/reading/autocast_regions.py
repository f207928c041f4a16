"""Regions of autocast: the `with` blocks, and what they say of their dtype."""

from __future__ import annotations

import ast

from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import keyword

AUTOCASTS = frozenset(
    (
        "torch.autocast",
        "torch.amp.autocast",
        "torch.amp.autocast_mode.autocast",
        "torch.cuda.amp.autocast",
        "torch.cuda.amp.autocast_mode.autocast",
        "torch.cpu.amp.autocast",
    )
)
_OLD = ("torch.cuda.amp.", "torch.cpu.amp.")  # `enabled` comes first, and the name says the device
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def is_on(source: Source, call: ast.AST) -> bool:
    """Whether an expression is an autocast to 16 bits: not made with `enabled=False`, nor for FP32."""
    if not isinstance(call, ast.Call) or source.path(call.func) not in AUTOCASTS:
        return False
    return not is_disabled(source, call) and not _is_in_fp32(source, call)


def is_disabled(source: Source, call: ast.AST) -> bool:
    """`torch.autocast(…, enabled=False)`."""
    if not isinstance(call, ast.Call) or source.path(call.func) not in AUTOCASTS:
        return False
    enabled = keyword(call, "enabled")
    if enabled is None and call.args and source.path(call.func).startswith(_OLD):
        enabled = call.args[0]
    return isinstance(enabled, ast.Constant) and enabled.value is False


def find_region(source: Source, node: ast.AST) -> tuple[ast.Call, list[ast.AST]] | None:
    """The autocast around a node in its function, and the nodes between them, the innermost first.

    None where there is none, or where a region that is off lies nearer. A decorator counts as a region.
    """
    between: list[ast.AST] = []
    for above in source.ancestors(node):
        if isinstance(above, (ast.With, ast.AsyncWith)):
            for item in reversed(above.items):
                if isinstance(item.context_expr, ast.Call) and source.is_call_to(item.context_expr, *AUTOCASTS):
                    return (item.context_expr, between) if is_on(source, item.context_expr) else None
        if isinstance(above, _FUNCTIONS):
            for mark in getattr(above, "decorator_list", ()):
                if isinstance(mark, ast.Call) and is_on(source, mark):
                    return mark, between
            return None
        between.append(above)
    return None


def dtype_of(source: Source, call: ast.Call) -> str:
    """'float16', 'bfloat16', 'default' where it names none, or '' where it is not shown."""
    given = keyword(call, "dtype") or (call.args[1] if len(call.args) > 1 else None)
    if given is None:
        path = source.path(call.func)
        return "bfloat16" if path.startswith("torch.cpu.") else "float16" if path.startswith(_OLD) else "default"
    path = source.path(source.value(given))
    return {"torch.float16": "float16", "torch.half": "float16", "torch.bfloat16": "bfloat16"}.get(path, "")


def _is_in_fp32(source: Source, call: ast.Call) -> bool:
    """`torch.autocast("cuda", dtype=torch.float32)`."""
    given = keyword(call, "dtype")
    return given is not None and source.path(given) in ("torch.float32", "torch.float")


def is_in_disabled_region(source: Source, node: ast.AST) -> bool:
    """Whether autocast is off around a node in its function, or in FP32: who wrote that has thought of dtypes."""
    for above in source.ancestors(node):
        if isinstance(above, (ast.With, ast.AsyncWith)):
            for item in reversed(above.items):
                if source.is_call_to(item.context_expr, *AUTOCASTS):
                    return not is_on(source, item.context_expr)
        if isinstance(above, _FUNCTIONS):
            return any(is_disabled(source, mark) for mark in getattr(above, "decorator_list", ()))
    return False
