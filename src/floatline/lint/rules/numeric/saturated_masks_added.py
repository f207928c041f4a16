"""FL113: two masks of the smallest number, added."""

from __future__ import annotations

import ast

from floatline.causes.overflow import SCALAR_OUT_OF_RANGE
from floatline.lint.rule import Rule


class SaturatedMasksAdded(Rule):
    """Flags the sum of two masks that are both filled with `torch.finfo(dtype).min`.

    ## Why is this bad?
    In FP16 -65504 - 65504 is -inf. A row that is masked everywhere is then -inf everywhere, and its softmax is NaN. In
    FP32 the sum of two masks is -inf as well, but there each of them absorbs the scores.
    """

    code = "FL113"
    name = "saturated-masks-added"
    holds = "autocast"
    cause = SCALAR_OUT_OF_RANGE
    message = (
        "both masks hold the dtype's smallest number: in FP16 their sum is -inf, and softmax of a row of -inf is NaN"
    )
    advice = "combine the masks as booleans (a | b) and fill once"
    words = ("finfo",)
    good = (
        "import torch\nlow = torch.finfo(x.dtype).min\ny = x.masked_fill(a | b, low)",
        "import torch\nlow = torch.finfo(x.dtype).min\ny = x + torch.zeros_like(x).masked_fill(a, low)",
        "import torch\nm = torch.zeros_like(x).masked_fill(a, -9.0)\nn = z.masked_fill(b, -9.0)\ny = m + n",
        "import torch\nm = z.masked_fill(a, torch.finfo(z.dtype).max)\nn = z.masked_fill(b, torch.finfo(z.dtype).min)\n"
        "y = m + n",
    )
    bad = (
        (
            "import torch\nlow = torch.finfo(x.dtype).min\ncausal = torch.zeros_like(x).masked_fill(a, low)\n"
            "padding = torch.zeros_like(x).masked_fill(b, low)\ny = x + (causal + padding)"
        ),
        (
            "from torch import finfo, full_like, where\nm = where(a, 0.0, finfo(x.dtype).min)\n"
            "n = full_like(x, finfo(x.dtype).min)\ny = m + n"
        ),
        ("import torch as t\nlow = t.finfo(z.dtype).min\nm = z.masked_fill(a, low)\nn = z.masked_fill(b, low)\nm += n"),
    )

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """`a + b`."""
        if isinstance(node.op, ast.Add) and self._is_mask(node.left) and self._is_mask(node.right):
            self.report(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        """`a += b`."""
        if not isinstance(node.op, ast.Add) or not isinstance(node.target, ast.Name):
            return
        if self._is_mask(node.target) and self._is_mask(node.value):
            self.report(node)

    def _is_mask(self, node: ast.expr) -> bool:
        """Whether a value is filled with the smallest number, wherever its mask says so."""
        if not isinstance(node, (ast.Name, ast.Call)):
            return False
        found = self.source.operation(self.source.value(node))
        if found is None or found.name not in ("masked_fill", "full_like", "full", "where", "new_full"):
            return False
        return any(self._is_smallest(value) for value in (*found.args, *found.keywords.values()))

    def _is_smallest(self, node: ast.expr) -> bool:
        node = self.source.value(node)
        return (
            isinstance(node, ast.Attribute)
            and node.attr == "min"
            and self.source.is_call_to(self.source.value(node.value), "torch.finfo")
        )
