"""FL135: a normalisation by hand that squares in 16 bits."""

from __future__ import annotations

import ast

from floatline.causes.overflow import PRODUCT_OVERFLOW
from floatline.lint.reading.gradients import is_beside_training
from floatline.lint.reading.source import Operation
from floatline.lint.reading.tensors import is_wide, pass_shapes, read_square, read_tensor_operation
from floatline.lint.rule import Rule


class MeanSquareInHalf(Rule):
    """Flags `x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)` without a cast to FP32 before the square.

    ## Why is this bad?
    The square of 256 is inf in FP16, the root of inf is inf, and x divided by it is 0: the layer gives zeros, and
    nothing that leaves it is inf or NaN. Hidden states of several hundred are common. Squares of numbers below 1.73e-04
    are 0.
    """

    code = "FL135"
    name = "mean-square-in-half"
    holds = "autocast"
    needs_proof = True
    needs_16_bits = True
    needs_gradient = True
    cause = PRODUCT_OVERFLOW
    message = (
        "the mean square is taken in the dtype of x: in FP16 a number from 256 on squares to inf, and the result is 0"
    )
    advice = "x.float().pow(2).mean(dim, keepdim=True), and cast the normalised result back"
    calls = frozenset(("sqrt", "rsqrt", "pow"))
    words = ("sqrt", "** -0.5", "**-0.5", "** 0.5", "**0.5", ".pow(")
    good = (
        "import torch\ny = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)",
        "import torch\nh = x.to(torch.float32)\ny = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "import torch\nfrom torch import nn\nclass Norm(nn.Module):\n    def norm(self, x):\n"
        "        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)\n"
        "    def forward(self, x):\n        return self.norm(x.float()).type_as(x)",
        "import numpy as np\nimport torch\ny = a / np.sqrt((a**2).mean() + 1e-6)",
        "import torch\ny = x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-6)",
    )
    bad = (
        "import torch\ny = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
        "import torch as t\nms = t.mean(x * x, dim=-1, keepdim=True)\ny = x / t.sqrt(ms + 1e-5)",
        "from torch import square\ny = x * (square(x).mean(dim=-1, keepdim=True) + eps) ** -0.5",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """`sqrt`, `rsqrt` and `pow`."""
        self._look(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """`** -0.5`."""
        if isinstance(node.op, ast.Pow):
            self._look(node)

    def _look(self, node: ast.Call | ast.BinOp) -> None:
        found = self.source.operation(node)
        if found is None or not self._is_root(found):
            return
        under = self.source.operation(pass_shapes(self.source, found.operand))
        if under is None or under.name != "add":
            return
        for side in (under.operand, *under.args):
            mean = read_tensor_operation(self.source, pass_shapes(self.source, side))
            if mean is None or mean.name != "mean" or "dtype" in mean.keywords:
                continue
            squared = read_square(self.source, mean.operand)
            if squared is None or self.source.dtype(squared) == "integer" or is_wide(self.source, squared):
                continue
            if not is_beside_training(self.source, node):
                self.report(mean.node, of=mean.operand)
            return

    def _is_root(self, found: Operation) -> bool:
        if found.name in ("sqrt", "rsqrt"):
            return not found.args
        power = self.source.number(found.argument(0, "exponent")) if found.name == "pow" else None
        return power in (0.5, -0.5)
