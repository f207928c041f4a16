"""What names mean in a source file: its imports, and how torch's functions are spelled in it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

import libcst as cst

_FUNCTIONAL = "torch.nn.functional"
# What is given to a framework that then computes in 16 bits by itself.
_SETTINGS = {"Accelerator": "mixed_precision", "Trainer": "precision", "Fabric": "precision"}


@dataclass
class Names:
    """The imports of a file, and what it defines.

    Args:
        aliases: Local name to the dotted path that it stands for.
        functions: Names of the functions and methods that the file defines.
        has_autocast: Whether the file enters an autocast region, or a framework does it for the file.
        formats: 'fp16' and 'bf16', as far as transformers' TrainingArguments are given them.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    has_autocast: bool = False
    formats: set[str] = field(default_factory=set[str])

    def resolve(self, node: cst.BaseExpression) -> str:
        """The dotted path that a name or attribute stands for: `F.softmax` is torch.nn.functional.softmax; or ''."""
        if isinstance(node, cst.Name):
            return self.aliases.get(node.value, "")
        if isinstance(node, cst.Attribute):
            owner = self.resolve(node.value)
            return f"{owner}.{node.attr.value}" if owner else ""
        return ""

    def spell(self, path: str) -> cst.BaseExpression | None:
        """A dotted path of torch in the file's own words; None where the file does not import torch so."""
        best = ""
        for name, stands_for in self.aliases.items():
            if path != stands_for and not path.startswith(f"{stands_for}."):
                continue
            text = name + path[len(stands_for) :]
            best = text if not best or len(text) < len(best) else best
        return cst.parse_expression(best) if best else None

    def functional(self, name: str) -> cst.BaseExpression | None:
        """A function of torch.nn.functional."""
        return self.spell(f"{_FUNCTIONAL}.{name}")


def read_names(text: str) -> Names:
    """What names mean in a file, by its imports, wherever they stand; of what is not Python, nothing."""
    try:
        return names_in_tree(ast.parse(text.lstrip("\ufeff")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Names()


def names_in_tree(tree: ast.Module) -> Names:
    """The same of a file that was parsed."""
    names = Names()
    waiting: list[ast.AST] = [tree]
    while waiting:  # in the order of the file, for a name that is imported twice
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            _read_import(node, names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.functions.add(node.name)
        elif isinstance(node, ast.Call):
            _read_call(node, names)
        waiting += reversed([*ast.iter_child_nodes(node)])
    return names


def _read_import(node: ast.Import | ast.ImportFrom, names: Names) -> None:
    """`import torch.nn as nn`, `from torch import nn`."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            names.aliases[alias.asname or first] = alias.name if alias.asname else first
    elif node.module and not node.level:
        for alias in node.names:
            if alias.name != "*":
                names.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"


def _read_call(node: ast.Call, names: Names) -> None:
    """`torch.autocast(…)`, and the settings of frameworks that enter it."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    given = {word.arg for word in node.keywords if word.arg and not _is_off(word.value)}
    names.has_autocast |= name in ("autocast", "MixedPrecision") or _SETTINGS.get(name, "") in given
    names.formats |= given & {"fp16", "bf16"} if name.endswith("TrainingArguments") else set()


def _is_off(node: ast.expr) -> bool:
    """False, None, numbers, and the words for FP32."""
    if not isinstance(node, ast.Constant):
        return False
    return node.value in ("no", "32", "32-true") or (
        isinstance(node.value, (int, type(None))) and node.value is not True
    )


def read_cast(call: cst.Call, names: Names) -> str:
    """'fp16' or 'bf16', the format that a call casts to; '' where nobody can tell."""
    name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    paths = {names.resolve(arg.value) for arg in call.args}
    if name == "half" or paths & {"torch.float16", "torch.half"}:
        return "fp16"
    return "bf16" if name == "bfloat16" or "torch.bfloat16" in paths else ""
