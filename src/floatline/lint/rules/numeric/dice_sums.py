"""FL136: a Dice loss whose sums run over all pixels in 16 bits."""

from __future__ import annotations

import ast

from floatline.causes.overflow import REDUCTION_OVERFLOW
from floatline.lint.reading.gradients import has_gradient
from floatline.lint.reading.tensors import is_wide
from floatline.lint.rule import Rule

_DEPTH = 6


class DiceSums(Rule):
    """Flags `2 * (p * t).sum() / (p.sum() + t.sum())` of tensors that are not shown to be FP32.

    ## Why is this bad?
    Every pixel is at most 1, but their sum is not: a crop of 256 x 256 has 65,536 pixels, and FP16 ends at 65504. The
    sums are inf, and the loss is inf / inf = NaN, or exactly 1. Above 2048 the sums also drop single pixels.
    """

    code = "FL136"
    name = "dice-sums"
    holds = "half"
    cause = REDUCTION_OVERFLOW
    message = "the sums of a Dice ratio run over all pixels: in FP16 65,520 ones are inf, and inf / inf is NaN"
    advice = "p, t = p.float(), t.float() first, or means instead of sums: the ratio is the same"
    words = (".sum(", "torch.sum(")
    good = (
        "import torch\np, t = p.float(), t.float()\n"
        "y = 2 * (p.float() * t).sum() / (p.float().sum() + t.float().sum())",
        "import torch\ny = 2 * (p * t).mean() / (p.mean() + t.mean())",
        "import numpy as np\nimport torch\ny = 2 * (p * t).sum() / (p.sum() + t.sum())",
        "import torch\ny = 2 * p.sum() / (n + t.sum())",
        "import torch\np = torch.nn.functional.grid_sample(p, points)\ny = 2 * (p * t).sum() / (p.sum() + t.sum())",
    )
    bad = (
        "import torch\ny = 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)",
        (
            "import torch as t\ninter = t.sum(p * target, dim=-1)\ntotal = t.sum(p, dim=-1) + t.sum(target, dim=-1)\n"
            "y = 1 - 2 * inter / total.clamp(min=1e-3)"
        ),
        (
            "from torch import nn\nclass Dice(nn.Module):\n    def forward(self, p, t):\n"
            "        above = 2 * (p * t).sum(1)\n"
            "        below = p.sum(-1) + t.sum(-1)\n        return 1 - (above + 1) / (below + 1)"
        ),
    )

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """A quotient of twice the sum of a product, and the sum of its two factors' sums."""
        if not isinstance(node.op, ast.Div):
            return
        factors = self._product(node.left)
        if factors is None:
            return
        sums = self._sums(node.right)
        if not {ast.dump(one) for one in factors} <= {ast.dump(one) for one in sums}:
            return
        if "grid_sample" in self.source.text:  # over a fixed number of sampled points, not over pixels
            return
        if any(is_wide(self.source, one) for one in (*factors, *sums)) or not has_gradient(self.source, node):
            return
        self.report(node)

    def _product(self, node: ast.expr, depth: int = 0) -> tuple[ast.expr, ast.expr] | None:
        """p and t of 2 * (p * t).sum() + 1."""
        node = self.source.value(node)
        if depth > _DEPTH:
            return None
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            return self._product(node.left, depth + 1) or self._product(node.right, depth + 1)
        inner = self._summed(node)
        inner = None if inner is None else self.source.value(inner)
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mult):
            return inner.left, inner.right
        return None

    def _sums(self, node: ast.expr, depth: int = 0) -> list[ast.expr]:
        """What is summed in p.sum() + t.sum() + 1, also behind a clamp."""
        node = self.source.value(node)
        if depth > _DEPTH:
            return []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [*self._sums(node.left, depth + 1), *self._sums(node.right, depth + 1)]
        found = self.source.operation(node)
        if found is not None and found.name in ("clamp", "clamp_min"):
            return self._sums(found.operand, depth + 1)
        inner = self._summed(node)
        return [] if inner is None else [inner]

    def _summed(self, node: ast.expr) -> ast.expr | None:
        """x of x.sum() and of torch.sum(x); numpy has the same, and then its import is in the file."""
        if not isinstance(node, ast.Call) or self.source.call_name(node) != "sum":
            return None
        if self.source.path(node.func) == "torch.sum":
            return node.args[0] if node.args else None
        if not isinstance(node.func, ast.Attribute) or self.source.path(node.func):
            return None
        is_sure = self.source.operation(node) is not None or self.source.is_module_class(self.source.class_of(node))
        if not is_sure and any(path.startswith("numpy") for path in self.source.aliases.values()):
            return None
        return node.func.value
