"""FL120: a root where nothing keeps its operand from zero."""

from __future__ import annotations

import ast

from floatline.causes.elsewhere import SINGULAR_GRADIENT
from floatline.lint.reading.gradients import has_gradient
from floatline.lint.reading.source import Operation
from floatline.lint.reading.tensors import is_same, is_wide, pass_shapes, read_square, read_tensor_operation
from floatline.lint.rule import Bad, Rule

_WHY = "an infinite gradient at 0, where FP16 is below 1.73e-04; and from 256 on the squares are inf"


class RootAtZero(Rule):
    """Flags roots (`sqrt`, `rsqrt`, powers between 0 and 1) of sums of squares and variances without an eps.

    ## Why is this bad?
    The derivative of a root at 0 is infinite. In backward that inf meets the 0 of the square, and the gradient is NaN.
    FP16 gets there sooner: the square of anything below 1.73e-04 is 0. The forward pass shows nothing, and masking the
    result afterwards does not help: 0 * inf is NaN. The squares also overflow, from 256 on.

    ## Fix safety
    Safe: `torch.linalg.vector_norm(x)` is the same function. Its gradient at zero is zero, and it adds up in FP32.
    """

    code = "FL120"
    name = "root-at-zero"
    only_if_selected = True
    holds = "autocast"
    cause = SINGULAR_GRADIENT
    message = f"the root of a sum of squares has {_WHY}"
    advice = (
        "torch.linalg.vector_norm(x, dim=dim), whose gradient at 0 is 0, or an eps of 1e-6 and FP32 inside the root"
    )
    fix_safety = "safe"
    calls = frozenset(("sqrt", "rsqrt", "sqrt_", "rsqrt_", "pow"))
    words = ("sqrt", "** 0.5", "**0.5", "** .5", "** (1 / 2)", "** (1/2)", ".pow(0.", ", 0.")
    good = (
        "import torch\ny = ((x - z).pow(2).sum(-1) + 1e-6).sqrt()",
        "import torch\ny = torch.linalg.vector_norm(x - z, dim=-1)",
        "import numpy as np\nimport torch\ny = np.sqrt(((x - z) ** 2).sum(-1))",
        "import torch\nwith torch.no_grad():\n    y = (x - z).pow(2).sum(-1).sqrt()",
        "import torch\ny = (x - z).pow(2).sum(-1).clamp(min=1e-4).sqrt()",
        "import torch\nfrom torch import nn\nclass Edges(nn.Module):\n    def forward(self, pos, i, j):\n"
        "        return (pos[i] - pos[j]).pow(2).sum(-1).sqrt()",
        "import torch\nprint((x - z).pow(2).sum().sqrt().item())",
        "import torch\ny = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)",
    )
    bad = (
        Bad(
            "import torch\ny = (x - z).pow(2).sum(-1).sqrt()",
            fixed="import torch\ny = torch.linalg.vector_norm(x - z, dim=-1)",
        ),
        Bad(
            "import torch as t\ny = t.sqrt(t.sum((x - z) ** 2, dim=1, keepdim=True))",
            fixed="import torch as t\ny = t.linalg.vector_norm(x - z, dim=1, keepdim=True)",
        ),
        "import torch\nd = x - z\ny = torch.mean(d * d) ** 0.5",
        "from torch import nn\nfrom torch.nn import functional as F\ny = F.mse_loss(x, z).sqrt()",
        Bad(
            "import torch\nd2 = (x[:, None] - x[None]).float().pow(2).sum(-1)\ny = d2.sqrt()",
            fixed="import torch\nd2 = (x[:, None] - x[None]).float().pow(2).sum(-1)\n"
            "y = torch.linalg.vector_norm((x[:, None] - x[None]).float(), dim=-1)",
        ),
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """`sqrt`, `rsqrt` and `pow`."""
        self._look(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """`** 0.5`."""
        if isinstance(node.op, ast.Pow):
            self._look(node)

    def _look(self, node: ast.Call | ast.BinOp) -> None:
        found = self.source.operation(node)
        if found is None or not self._is_root(found):
            return
        what, inner = self._read_what(found.operand)
        if not what or not has_gradient(self.source, node):
            return
        # Only what is exactly zero by construction breaks in FP32 as well.
        if is_wide(self.source, found.operand) and not (inner is not None and self._is_pairwise(inner)):
            return
        if inner is not None and what == "a sum of squares" and not self._can_vanish(inner, node):
            return
        plain = found.name in ("sqrt", "pow") and what == "a sum of squares"
        fixable = plain and self.source.number(found.argument(0, "exponent")) in (None, 0.5)
        self.report(node, seen=f"the root of {what} has {_WHY}", fix="vector-norm" if fixable else None)

    def _is_root(self, found: Operation) -> bool:
        if found.name in ("sqrt", "rsqrt"):
            return not found.args
        power = self.source.number(found.argument(0, "exponent")) if found.name == "pow" else None
        return power is not None and 0 < power < 1

    def _read_what(self, node: ast.expr) -> tuple[str, ast.expr | None]:
        """What is under the root, if it can be 0; and what was squared."""
        node = pass_shapes(self.source, node)
        found = read_tensor_operation(self.source, node)
        if found is None:
            return "", None
        if found.name in ("sum", "mean"):
            inner = read_square(self.source, found.operand)
            if inner is None:
                return self._read_mean_of_sums(found)
            return ("a sum of squares" if found.name == "sum" else "a mean of squares"), inner
        if found.name == "add" and isinstance(found.node, ast.BinOp):
            sides = [read_square(self.source, side) for side in (found.operand, found.args[0])]
            return ("a sum of squares without an eps", None) if all(sides) and self._are_tensors(sides) else ("", None)
        if found.name == "var":
            return "a variance", None
        if found.name == "mse_loss" and "reduction" not in found.keywords:
            return "a mean of squares", None
        if found.name in ("clamp", "clamp_min") and self.source.number(found.argument(0, "min")) == 0.0:
            what, inner = self._read_what(found.operand)
            return what, inner
        return "", None

    def _read_mean_of_sums(self, found: Operation) -> tuple[str, ast.expr | None]:
        inner = read_tensor_operation(self.source, pass_shapes(self.source, found.operand))
        if inner is None or inner.name not in ("sum", "mean"):
            return "", None
        squared = read_square(self.source, inner.operand)
        return ("a mean of squares", squared) if squared is not None else ("", None)

    def _are_tensors(self, sides: list[ast.expr | None]) -> bool:
        return all(side is not None and self.source.is_tensor(side) for side in sides)

    def _can_vanish(self, inner: ast.expr, node: ast.AST) -> bool:
        """A difference, and what a loss adds up; the length of an embedding, or of an edge, is not 0."""
        found = self.source.operation(self._unwrapped(inner))
        if found is not None and found.name == "sub":
            sides = (found.operand, found.args[0])
            return not all(isinstance(side, ast.Subscript) and isinstance(side.slice, ast.Name) for side in sides)
        function = self.source.function(node)
        name = function.name.lower() if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) else "loss"
        return any(word in name for word in ("loss", "penalty", "regular"))

    def _is_pairwise(self, node: ast.expr) -> bool:
        """x[:, None] - x[None]: the diagonal is 0."""
        found = self.source.operation(self._unwrapped(node))
        if found is None or found.name != "sub":
            return False
        left, right = self._base(found.operand), self._base(found.args[0])
        return left is not found.operand and right is not found.args[0] and is_same(left, right)

    def _unwrapped(self, node: ast.expr) -> ast.expr:
        made = self.source.value(node)
        if (
            isinstance(made, ast.Call)
            and isinstance(made.func, ast.Attribute)
            and made.func.attr in ("float", "double")
        ):
            return self.source.value(made.func.value)
        return made

    def _base(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Subscript):
            return node.value
        found = self.source.operation(node)
        return found.operand if found is not None and found.name == "unsqueeze" else node
