"""FL124: a squared distance as x² + y² - 2xy."""

from __future__ import annotations

import ast

from floatline.causes.rounding import CANCELLATION
from floatline.lint.reading.gradients import is_beside_training
from floatline.lint.reading.silence import stays_silent
from floatline.lint.reading.tensors import is_wide, pass_shapes, read_square, read_tensor_operation
from floatline.lint.rule import Rule

_PRODUCTS = frozenset(("matmul", "mm", "bmm", "einsum"))


class ExpandedDistance(Rule):
    """Flags `x.pow(2).sum(1) + y.pow(2).sum(1) - 2 * x @ y.T`.

    ## Why is this bad?
    For points that are near each other the terms are large and their difference small: of 64 numbers around 10 that
    differ by 0.01 the squared distance is 0.012, the terms are 6400, and FP16 gives 0: it counts in steps of 4 there.
    The result may be negative, its root is then NaN, and the nearest of several points is picked by rounding.
    """

    code = "FL124"
    name = "expanded-distance"
    holds = "autocast"
    only_if_selected = True
    needs_16_bits = True
    needs_gradient = True
    cause = CANCELLATION
    message = "x² + y² - 2xy subtracts near-equal numbers: in 16 bits small distances are rounding error, or negative"
    advice = 'torch.cdist(x.float(), y.float(), compute_mode="donot_use_mm_for_euclid_dist"), or all of it in FP32'
    words = (" @ ", "matmul", "mm(", "einsum")
    good = (
        "import torch\ny = torch.cdist(rows, columns).pow(2)",
        "import torch\ny = rows.pow(2).sum(1, keepdim=True) + rows @ columns.T",
        "import torch\na, b = rows.float(), columns.float()\n"
        "y = a.float().pow(2).sum(1, keepdim=True) - 2 * torch.mm(a, b.T).float()",
        "import numpy as np\nimport torch\ny = (a**2).sum(1) - 2 * np.matmul(a, b.T) + (b**2).sum(1)",
    )
    bad = (
        "import torch\ny = rows.pow(2).sum(1, keepdim=True) + columns.pow(2).sum(1) - 2 * rows @ columns.T",
        (
            "import torch as t\na = t.sum(rows**2, dim=1, keepdim=True)\n"
            "y = a - 2 * t.matmul(rows, columns.t()) + t.sum(columns**2, dim=1)"
        ),
        "from torch import mm\ny = rows.square().sum(-1, keepdim=True) - mm(rows, columns.T) * 2.0",
    )

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """The difference that takes off twice a matrix product."""
        if not isinstance(node.op, (ast.Sub, ast.Add)):
            return
        product = self._doubled(node.right)
        if product is None or (isinstance(node.op, ast.Add) != (product < 0)):
            return
        whole: ast.BinOp = node
        for above in self.source.ancestors(node):
            if not isinstance(above, ast.BinOp) or not isinstance(above.op, (ast.Add, ast.Sub)):
                break
            whole = above
        terms = _terms(whole)
        squares = [one for one in terms if self._is_sum_of_squares(one)]
        if not squares or any(is_wide(self.source, one) for one in squares):
            return
        if stays_silent(self.source, whole, *squares):
            return
        if is_beside_training(self.source, node):
            return
        self.report(whole)

    def _doubled(self, node: ast.expr) -> float | None:
        """2 or -2 where the term is that times a matrix product."""
        node = self.source.value(node)
        if not isinstance(node, ast.BinOp):
            return None
        factors = _factors(node)
        numbers = [number for one in factors if (number := self.source.number(one)) is not None]
        rest = [one for one in factors if self.source.number(one) is None]
        if len(numbers) != 1 or abs(numbers[0]) != 2.0:
            return None
        if isinstance(node.op, ast.MatMult) or any(isinstance(one, ast.BinOp) for one in rest):
            return numbers[0]
        found = self.source.operation(pass_shapes(self.source, rest[0])) if len(rest) == 1 else None
        return numbers[0] if found is not None and found.name in _PRODUCTS else None

    def _is_sum_of_squares(self, node: ast.expr) -> bool:
        found = read_tensor_operation(self.source, pass_shapes(self.source, node))
        return found is not None and found.name == "sum" and read_square(self.source, found.operand) is not None


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return [*_terms(node.left), *_terms(node.right)]
    return [node]


def _factors(node: ast.expr) -> list[ast.expr]:
    """Of `2 * a @ b` and `a @ b * 2`: the number, and a product as one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        inner = [one for one in _factors(node.left) if isinstance(one, (ast.Constant, ast.UnaryOp))]
        return [*inner, node]
    return [node]
