"""FL123: a variance as the mean of squares minus the square of the mean."""

from __future__ import annotations

import ast

from floatline.causes.rounding import CANCELLATION
from floatline.lint.reading.source import Operation
from floatline.lint.reading.tensors import is_same, is_wide, read_square, read_tensor_operation
from floatline.lint.rule import Bad, Rule


class OnePassVariance(Rule):
    """Flags `(x ** 2).mean() - x.mean() ** 2`.

    ## Why is this bad?
    Both terms are about mean², and their difference is all rounding: numbers with mean 30 and standard deviation 0.2
    have a variance of 0.040, and FP16 gives 0.0, half a spacing being 0.25 at 900. It may also be negative, and the
    root of it NaN. The square overflows from 256 on.

    ## Fix safety
    Safe: `x.var(unbiased=False)` is the same function; it subtracts the mean first.
    """

    code = "FL123"
    name = "one-pass-variance"
    holds = "autocast"
    cause = CANCELLATION
    message = "mean(x²) - mean(x)² subtracts two near-equal numbers: in 16 bits the variance is their rounding error"
    advice = "x.var(dim, unbiased=False)"
    fix_safety = "safe"
    words = ("mean",)
    good = (
        "import torch\ny = x.var(-1, unbiased=False)",
        "import torch\ny = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1)",
        "import numpy as np\nimport torch\ny = np.mean(x**2) - np.mean(x) ** 2",
        "import torch\nw = x.float()\ny = (w * w).mean(dim=-1) - w.mean(dim=-1) ** 2",
        "import torch\ny = (x * x).mean(dim=-1) - z.mean(dim=-1) ** 2",
    )
    bad = (
        Bad(
            "import torch\ny = (x**2).mean(dim=-1) - x.mean(dim=-1) ** 2",
            fixed="import torch\ny = x.var(dim=-1, unbiased=False)",
        ),
        Bad(
            "import torch as t\nmu = t.mean(x, dim=0, keepdim=True)\ny = t.mean(x * x, dim=0, keepdim=True) - mu * mu",
            fixed="import torch as t\nmu = t.mean(x, dim=0, keepdim=True)\n"
            "y = x.var(dim=0, keepdim=True, unbiased=False)",
        ),
        Bad(
            "from torch import mean, square\ny = mean(square(x)) - square(mean(x))",
            fixed="from torch import mean, square\ny = x.var(unbiased=False)",
        ),
        Bad(
            "import torch\ny = x.pow(2).mean(-1) - x.mean(dim=-1).pow(2)",
            fixed="import torch\ny = x.var(dim=-1, unbiased=False)",
        ),
    )

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """A difference whose right side is a square."""
        if not isinstance(node.op, ast.Sub) or not isinstance(node.right, (ast.BinOp, ast.Call, ast.Name)):
            return
        right = self.source.value(node.right)
        mean = read_square(self.source, right)
        small = None if mean is None else self._mean(mean)
        if small is None:
            return
        large = self._mean(node.left)
        squared = None if large is None else read_square(self.source, large.operand)
        if large is None or squared is None or not is_same(squared, small.operand):
            return
        if is_wide(self.source, squared) or self._names_float64(large):
            return
        self.report(node, fix="two-pass-variance", of=large.operand)

    def _mean(self, node: ast.expr) -> Operation | None:
        found = read_tensor_operation(self.source, self.source.value(node))
        return found if found is not None and found.name == "mean" else None

    def _names_float64(self, found: Operation) -> bool:
        dtype = found.keywords.get("dtype")
        return dtype is not None and self.source.path(dtype) in ("torch.float32", "torch.float64", "torch.float")
