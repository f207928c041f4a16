"""FL130: a parameter that is trained in 16 bits."""

from __future__ import annotations

import ast

from floatline.causes.rounding import UPDATE_LOST_TO_ROUNDING
from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import keyword
from floatline.lint.rule import Rule

_QUANTIZED = frozenset(("int8", "uint8", "int32", "qint8"))  # next to such weights the others are only their scales


class HalfParameter(Rule):
    """Flags `nn.Parameter(torch.zeros(4, dtype=torch.float16))` and `nn.Parameter(w.half())` that asks for gradients.

    ## Why is this bad?
    An update below half a spacing is lost: FP16 cannot add less than 1/4096 of a weight, BF16 less than 1/512, and Adam
    moves a weight by about its learning rate, often 1e-4. `GradScaler` raises on FP16 gradients ("Attempting to unscale
    FP16 gradients"), and Adam's 1e-8 is 0 in FP16.
    """

    code = "FL130"
    name = "half-parameter"
    holds = "autocast"
    needs_gradient = True
    cause = UPDATE_LOST_TO_ROUNDING
    message = (
        "a trained parameter in 16 bits: updates below 1/4096 of it (BF16: 1/512) are lost, and GradScaler refuses FP16"
    )
    advice = "keep the parameter in FP32 and let autocast cast it; for a frozen one say requires_grad=False"
    calls = frozenset(("Parameter",))
    words = ("half", "float16")
    good = (
        "import torch\nfrom torch import nn\nw = nn.Parameter(torch.zeros(4))",
        "import torch\nfrom torch import nn\n"
        "w = nn.Parameter(torch.zeros(4, dtype=torch.float16), requires_grad=False)",
        "import torch\nfrom torch import nn\nw = nn.Parameter(x.half().float())",
        "import torch\nfrom torch import nn\nw = nn.Parameter(x.half())\nw.requires_grad = False",
    )
    bad = (
        "import torch\nfrom torch import nn\nw = nn.Parameter(torch.zeros(4, dtype=torch.float16))",
        "import torch as t\nw = t.nn.Parameter(t.randn(4).to(t.bfloat16))",
        "from torch.nn import Parameter as P\nw = P(x.half(), requires_grad=True)",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A parameter made of what the file shows to be 16 bits, in a class or function that freezes nothing."""
        path = self.source.path(node.func)
        if path not in ("torch.nn.Parameter", "torch.nn.parameter.Parameter"):
            return
        data = node.args[0] if node.args else keyword(node, "data")
        asked = node.args[1] if len(node.args) > 1 else keyword(node, "requires_grad")
        if data is None or (asked is not None and not (isinstance(asked, ast.Constant) and asked.value is True)):
            return
        if self.source.dtype(data) != "half" or is_fp8(self.source, data) or self._is_frozen(node):
            return
        self.report(node)

    def _is_frozen(self, node: ast.AST) -> bool:
        """requires_grad is set, or weights are quantized, in the same class or function."""
        around: ast.AST = self.source.class_of(node) or self.source.function(node)
        for part in ast.walk(around):
            if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Attribute):
                if part.targets[0].attr == "requires_grad":
                    return True
            elif isinstance(part, ast.Attribute) and (part.attr == "requires_grad_" or part.attr in _QUANTIZED):
                return True
        return False


def is_fp8(source: Source, node: ast.expr, *, depth: int = 0) -> bool:
    """Whether an expression, or what its names were made from, names an 8-bit float: weights of inference."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr.startswith("float8"):
            return True
        if isinstance(part, ast.Name) and depth < 4:
            made = source.value(part)
            if made is not part and is_fp8(source, made, depth=depth + 1):
                return True
    return False
