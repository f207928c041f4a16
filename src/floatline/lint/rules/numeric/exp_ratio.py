"""FL106: exp, then a division by its sum."""

from __future__ import annotations

import ast

from floatline.causes.overflow import EXP_OVERFLOW
from floatline.lint.reading.silence import stays_silent
from floatline.lint.reading.tensors import is_bounded, is_same, read_exp
from floatline.lint.rule import Bad, Rule


class ExpRatio(Rule):
    """Flags `torch.exp(x) / torch.exp(x).sum()` and `1 / (1 + torch.exp(-x))`.

    ## Why is this bad?
    In FP16 exp(x) is inf above x = 11.09. inf / inf is NaN; 1 / (1 + inf) is 0, which is right, but its gradient is
    0 * inf, which is NaN.

    ## Fix safety
    Safe: `softmax` and `sigmoid` are the same functions, and shift before they exponentiate. Where a guard is added to
    the sum, or where `keepdim` is missing, nothing is rewritten.
    """

    code = "FL106"
    name = "exp-ratio"
    holds = "half"
    needs_gradient = True
    cause = EXP_OVERFLOW
    message = "exp(x) is inf in FP16 above x = 11.09, and inf / inf is NaN"
    advice = "torch.softmax(x, dim)"
    fix_safety = "safe"
    words = ("exp(",)
    good = (
        "import torch\ny = torch.softmax(x, -1)",
        "import torch\ne = torch.exp(x - x.amax(-1, keepdim=True))\ny = e / e.sum(-1, keepdim=True)",
        "import numpy as np\nimport torch\ny = np.exp(x) / np.exp(x).sum()",
        "import torch\ne = x.float().exp()\ny = e / e.sum(-1, keepdim=True)",
        "import torch\ny = 1 / (1 + torch.exp(-x.abs()))",
        "import torch\ny = torch.exp(x) / z",
    )
    bad = (
        Bad(
            "import torch as t\ny = t.exp(x) / t.exp(x).sum(-1, keepdim=True)",
            fixed="import torch as t\ny = t.softmax(x, -1)",
        ),
        Bad(
            "import torch\ny = 1 / (1 + torch.exp(-x))",
            fixed="import torch\ny = torch.sigmoid(x)",
        ),
        "from torch import exp\ne = exp(x)\ny = e / (e.sum(dim=-1, keepdim=True) + 1e-8)",
        Bad(
            "import torch\ny = 1.0 / (1.0 + (-3 * x).exp())",
            fixed="import torch\ny = torch.sigmoid(3 * x)",
        ),
    )

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """A quotient whose lower part is made of exp."""
        if not isinstance(node.op, ast.Div):
            return
        source = self.source
        below = source.operation(source.value(node.right))
        if below is None or below.name not in ("sum", "add"):
            return
        is_guarded = False
        if below.name == "add":
            sides = (below.operand, below.args[0]) if below.args else ()
            for side, number in (sides, sides[::-1]) if sides else ():
                if source.number(number) == 1 and (found := read_exp(source, side)) is not None:
                    self._report_sigmoid(node, found)
                    return
            total = next((one for one in map(source.operation, sides) if one is not None and one.name == "sum"), None)
            if total is None:
                return
            below, is_guarded = total, True
        above, inner = read_exp(source, node.left), read_exp(source, below.operand)
        if above is None or inner is None or not is_same(above, inner):
            return
        if is_bounded(source, above) or stays_silent(source, node, node.left, above):
            return
        self.report(node, fix=None if is_guarded else "exp-ratio")

    def _report_sigmoid(self, node: ast.BinOp, inner: ast.expr) -> None:
        source = self.source
        above = read_exp(source, node.left)
        if above is None and source.number(node.left) != 1:
            return
        if (above is not None and not is_same(above, inner)) or is_bounded(source, inner):
            return
        if source.number(inner) is not None or stays_silent(source, node, inner):
            return
        seen = "exp is inf in FP16 above 11.09: the gradient of 1 / (1 + inf) is 0 * inf, which is NaN"
        if above is not None:
            seen = "exp(x) is inf in FP16 above x = 11.09, and inf / (1 + inf) is NaN"
        self.report(node, seen=seen, advice="torch.sigmoid(x)", fix="exp-ratio")
