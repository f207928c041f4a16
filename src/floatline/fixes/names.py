"""What names mean in a source file: its imports, and how torch's functions are spelled in it."""

from __future__ import annotations

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


class ReadImports(cst.CSTVisitor):
    """Collects the imports of a file, wherever they stand, and the names of its functions."""

    def __init__(self) -> None:
        self.names = Names()

    def visit_Import(self, node: cst.Import) -> None:  # noqa: N802
        """`import torch.nn as nn`."""
        for alias in node.names:
            path = _dotted(alias.name)
            if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
                self.names.aliases[alias.asname.name.value] = path
            else:
                self.names.aliases[path.split(".")[0]] = path.split(".")[0]

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802
        """`from torch import nn`."""
        if node.relative or node.module is None or isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            local = alias.asname.name if alias.asname is not None else alias.name
            if isinstance(local, cst.Name):
                self.names.aliases[local.value] = f"{_dotted(node.module)}.{_dotted(alias.name)}"

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        """`def forward(…)`."""
        self.names.functions.add(node.name.value)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        """`torch.autocast(…)`, and the settings of frameworks that enter it."""
        last = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        name = last.value if isinstance(last, cst.Name) else ""
        given = {arg.keyword.value for arg in node.args if arg.keyword is not None and not _is_off(arg.value)}
        self.names.has_autocast |= name in ("autocast", "MixedPrecision") or _SETTINGS.get(name, "") in given
        self.names.formats |= given & {"fp16", "bf16"} if name.endswith("TrainingArguments") else set()


def _is_off(node: cst.BaseExpression) -> bool:
    """False, None, and the words for FP32."""
    if isinstance(node, cst.SimpleString):
        return node.evaluated_value in ("no", "32", "32-true")
    return isinstance(node, cst.Integer) or (isinstance(node, cst.Name) and node.value in ("False", "None"))


def read_cast(call: cst.Call, names: Names) -> str:
    """'fp16' or 'bf16', the format that a call casts to; '' where nobody can tell."""
    name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    paths = {names.resolve(arg.value) for arg in call.args}
    if name == "half" or paths & {"torch.float16", "torch.half"}:
        return "fp16"
    return "bf16" if name == "bfloat16" or "torch.bfloat16" in paths else ""


def _dotted(node: cst.BaseExpression) -> str:
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""
