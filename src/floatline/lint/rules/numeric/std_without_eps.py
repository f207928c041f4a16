"""FL132: a division by a standard deviation without an eps."""

from __future__ import annotations

import ast

from floatline.causes.rounding import ROUNDED_ONTO_SINGULARITY
from floatline.lint.reading.gradients import is_beside_training
from floatline.lint.reading.tensors import is_wide, pass_shapes, read_tensor_operation
from floatline.lint.rule import Rule


class StdWithoutEps(Rule):
    """Flags `(x - x.mean()) / x.std()`.

    ## Why is this bad?
    Equal numbers have a standard deviation of 0, and 0 / 0 is NaN. In 16 bits numbers become equal: FP16 tells 1.0000
    from 1.0002 no more (BF16: from 1.002), so a batch that varies little has a standard deviation of exactly 0. A batch
    of one has NaN.
    """

    code = "FL132"
    name = "std-without-eps"
    only_if_selected = True
    holds = "half"
    needs_gradient = True
    cause = ROUNDED_ONTO_SINGULARITY
    message = "a division by a standard deviation without an eps: where 16 bits round all numbers to one it is 0 / 0"
    advice = "x / (x.std() + 1e-4), or the statistics in FP32: x.float().std()"
    words = ("std(", "var(")
    good = (
        "import torch\ny = (x - x.mean(dim=-1, keepdim=True)) / (x.std(dim=-1, keepdim=True) + 1e-4)",
        "import torch\ny = x / x.float().std(dim=-1, keepdim=True)",
        "import numpy as np\nimport torch\ny = (a - np.mean(a)) / np.std(a)",
        "import torch\ny = x / x.std(dim=-1, keepdim=True).clamp(min=1e-4)",
        "import torch\ny = (image - mean) / std",
    )
    bad = (
        "import torch\ny = (x - x.mean(dim=-1, keepdim=True)) / x.std(dim=-1, keepdim=True)",
        "import torch as t\ns = t.std(x, dim=0)\ny = x / s",
        "from torch import var\ny = x / var(x, dim=-1, keepdim=True).sqrt()",
        "import torch\ny = torch.div(x, x.std(dim=0, keepdim=True))",
    )
    calls = frozenset(("div", "div_"))

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """`x / x.std()`."""
        if isinstance(node.op, ast.Div) and isinstance(node.right, (ast.Call, ast.Name, ast.Subscript)):
            self._look(node, node.right)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """`x.div(x.std())`."""
        found = self.source.operation(node)
        if found is not None and found.args:
            self._look(node, found.args[0])

    def _look(self, node: ast.expr, below: ast.expr) -> None:
        made = read_tensor_operation(self.source, pass_shapes(self.source, below))
        what = "a standard deviation"
        if made is not None and made.name == "sqrt":
            made = read_tensor_operation(self.source, pass_shapes(self.source, made.operand))
            if made is None or made.name != "var":
                return
        elif made is not None and made.name == "var":
            what = "a variance"
        elif made is None or made.name != "std":
            return
        if (
            self.source.dtype(made.operand) == "integer"
            or is_wide(self.source, made.operand)
            or is_beside_training(self.source, node)
        ):
            return
        self.report(node, seen=self.message.replace("a standard deviation", what))
