"""FL137: an eps that is that of the input's dtype, beside a mean of squares or a variance."""

from __future__ import annotations

import ast

from floatline.causes.rounding import EPS_TOO_LARGE
from floatline.lint.reading.tensors import pass_shapes, read_tensor_operation
from floatline.lint.reading.values import reaching_values
from floatline.lint.rule import Rule

_WIDE = ("torch.float32", "torch.float", "torch.float64", "torch.double")


class EpsOfTheDtype(Rule):
    """Flags `torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)`.

    ## Why is this bad?
    `torch.finfo(x.dtype).eps` is 1.2e-7 in FP32, 0.00098 in FP16 and 0.0078 in BF16. A mean of squares of activations
    around 0.05 is 0.0025: in BF16 the eps is three times what it guards, and the norm no longer normalises. Where
    activations are near 1 nothing happens, so the rule is asked only if it is selected, or with `--half`.
    """

    code = "FL137"
    name = "eps-of-the-dtype"
    only_if_selected = True
    holds = "any"
    needs_gradient = True
    cause = EPS_TOO_LARGE
    message = "the eps of the input's dtype is 0.00098 in FP16 and 0.0078 in BF16: as large as a mean of small squares"
    advice = "torch.finfo(torch.float32).eps, or 1e-6"
    words = (".eps",)
    good = (
        "import torch\ny = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)",
        "import torch\ny = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "import torch\np = p.clamp(torch.finfo(p.dtype).eps, 1 - torch.finfo(p.dtype).eps)",
        "import torch\ny = x / (x.abs().sum(-1, keepdim=True) + torch.finfo(x.dtype).tiny)",
    )
    bad = (
        "import torch\ny = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)",
        "import torch as t\neps = t.finfo(x.dtype).eps\npower = x.square().mean(-1)\ny = x / t.sqrt(eps + power)",
        "from torch import finfo\ny = x / (x.var(-1, keepdim=True) + finfo(x.dtype).eps).sqrt()",
        (
            "import torch\neps = torch.finfo(x.dtype).eps if eps is None else eps\n"
            "y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)"
        ),
    )

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """A sum of both."""
        if not isinstance(node.op, ast.Add):
            return
        for eps, beside in ((node.right, node.left), (node.left, node.right)):
            if self._is_of_the_dtype(eps) and self._is_of_squares(beside):
                self.report(node)
                return

    def _is_of_the_dtype(self, node: ast.expr) -> bool:
        """`torch.finfo(x.dtype).eps`, or a name of it."""
        return any(
            isinstance(value, ast.Attribute)
            and value.attr == "eps"
            and isinstance(value.value, ast.Call)
            and self.source.path(value.value.func) == "torch.finfo"
            and bool(value.value.args)
            and self.source.path(value.value.args[0]) not in _WIDE
            for one in (reaching_values(self.source, node) if isinstance(node, ast.Name) else [node])
            for value in ((one.body, one.orelse) if isinstance(one, ast.IfExp) else (one,))
        )

    def _is_of_squares(self, node: ast.expr) -> bool:
        """A variance, or the mean of squares."""
        made = read_tensor_operation(self.source, pass_shapes(self.source, node))
        if made is None or made.name != "mean":
            return made is not None and made.name == "var"
        inner = read_tensor_operation(self.source, pass_shapes(self.source, made.operand))
        return inner is not None and inner.name in ("pow", "square", "mul")
