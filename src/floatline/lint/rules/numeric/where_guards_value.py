"""FL121: a `where` that guards the value and not the gradient."""

from __future__ import annotations

import ast

from floatline.causes.elsewhere import SINGULAR_GRADIENT
from floatline.lint.reading.gradients import has_gradient
from floatline.lint.reading.source import Operation
from floatline.lint.reading.tensors import is_same
from floatline.lint.rule import Rule

_SINGULAR = frozenset(
    ("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "acos", "asin", "exp", "expm1", "div", "pow")
)


class WhereGuardsValue(Rule):
    """Flags `torch.where(x > 0, torch.log(x), 0)`: the branch that is not taken is differentiated too.

    ## Why is this bad?
    Both branches are computed for every element, and backward multiplies the gradient of the one that was not taken by
    0. At x = 0 that is 0 * inf = NaN, for log, sqrt, reciprocal and division; for exp in FP16 from x = 11.1 on. The
    value is right and the gradient of the whole tensor behind it is lost.
    """

    code = "FL121"
    name = "where-guards-value"
    only_if_selected = True
    holds = "autocast"
    cause = SINGULAR_GRADIENT
    message = "where picks the value, but a singular branch is differentiated everywhere, and 0 * inf is NaN"
    advice = "safe = torch.where(cond, x, 1.0) first, then torch.where(cond, f(safe), 0.0)"
    calls = frozenset(("where",))
    good = (
        "import torch\nsafe = torch.where(x > 0, x, 1.0)\ny = torch.where(x > 0, torch.log(safe), 0.0)",
        "import torch\ny = torch.where(x > 0, torch.log(x.clamp(min=1e-4)), 0.0)",
        "import numpy as np\nimport torch\ny = np.where(x > 0, np.log(x), 0.0)",
        "import torch\ny = torch.where(mask, torch.log(x), 0.0)",
        "import torch\nwith torch.no_grad():\n    y = torch.where(x > 0, torch.log(x), 0.0)",
        "import torch\ny = torch.where(x > 0, torch.log(x + 1e-4), 0.0)",
        "import torch\ny = torch.where(x > 0, x / 2.0, 0.0)",
    )
    bad = (
        "import torch\ny = torch.where(x > 0, torch.log(x), 0.0)",
        "from torch import where\ny = where(z != 0, x / z, 0.0)",
        "import torch as t\ny = t.where(x.abs() < 5, x.exp(), x)",
        "import torch\nroot = x.sqrt()\nkeep = x > 0\ny = torch.where(keep, root, torch.zeros_like(x))",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """`where` with three arguments, whose condition looks at what the singular function is given."""
        found = self.source.operation(node)
        if found is None or found.name != "where":
            return
        if found.is_method:
            parts = [found.argument(0, "condition"), found.operand, found.argument(1, "other")]
        else:
            parts = [found.operand, found.argument(0, "input"), found.argument(1, "other")]
        condition, *branches = parts
        if condition is None or any(branch is None for branch in branches):
            return
        looked_at = self._looked_at(condition)
        for branch in branches:
            inner = None if branch is None else self._singular(branch)
            if inner is None:
                continue
            name, operand = inner
            if not any(is_same(operand, one) for one in looked_at):
                continue
            if name == "the quotient" and self._holds_at_zero(condition) is (branch is branches[0]):
                continue  # at the pole this branch is the one that is taken
            if self.source.number(operand) is not None or self._is_data(operand) or not has_gradient(self.source, node):
                return
            self.report(node, seen=self.message.replace("a singular branch", name))
            return

    def _holds_at_zero(self, condition: ast.expr) -> bool | None:
        """Whether `x < 1` holds at x = 0; None where it is not such a test."""
        test = self.source.value(condition)
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return None
        bound = self.source.number(test.comparators[0])
        if not bound:
            return None
        kinds: dict[type[ast.cmpop], bool] = {
            ast.Lt: bound > 0,
            ast.LtE: bound >= 0,
            ast.Gt: bound < 0,
            ast.GtE: bound <= 0,
        }
        return kinds.get(type(test.ops[0]))

    def _looked_at(self, condition: ast.expr) -> list[ast.expr]:
        """What the condition compares: the operand of x > 0, of x.abs() < 5, and of both sides of `a & b`."""
        condition = self.source.value(condition)
        if isinstance(condition, ast.BinOp) and isinstance(condition.op, (ast.BitAnd, ast.BitOr)):
            return [*self._looked_at(condition.left), *self._looked_at(condition.right)]
        if isinstance(condition, ast.UnaryOp):
            return self._looked_at(condition.operand)
        if isinstance(condition, ast.Compare):
            sides = [condition.left, *condition.comparators]
            numbers = [side for side in sides if self.source.number(side) is not None]
            return [one for side in sides for one in self._with_inner(side)] if numbers else []
        found = self.source.operation(condition)
        if found is not None and found.name in ("gt", "lt", "ge", "le", "ne", "eq", "isfinite", "isclose"):
            return self._with_inner(found.operand)
        return []

    def _with_inner(self, node: ast.expr) -> list[ast.expr]:
        found = self.source.operation(node)
        return [node, found.operand] if found is not None and found.name == "abs" else [node]

    def _singular(self, branch: ast.expr) -> tuple[str, ast.expr] | None:
        """The function that is singular, and what it is singular in."""
        branch = self.source.value(branch)
        if isinstance(branch, ast.UnaryOp):
            branch = branch.operand
        found = self.source.operation(branch)
        if found is None:
            return None
        if found.name in ("mul", "add", "sub") and isinstance(found.node, ast.BinOp):
            return self._singular(found.operand) or self._singular(found.args[0])
        return self._point(found) if found.name in _SINGULAR else None

    def _point(self, found: Operation) -> tuple[str, ast.expr] | None:
        if found.name == "div":
            return ("the quotient", found.args[0]) if found.args else None
        if found.name == "pow":
            power = self.source.number(found.argument(0, "exponent"))
            return ("the power", found.operand) if power is not None and power < 1 else None
        if found.name in ("exp", "expm1") and self.source.dtype(found.operand) == "wide":
            return None
        return found.name, found.operand

    def _is_data(self, node: ast.expr) -> bool:
        """Counts and integers have no gradient, whatever they are cast to."""
        made = self.source.value(node)
        while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute):
            if made.func.attr not in ("float", "double", "half", "to", "type", "type_as", "unsqueeze", "view"):
                break
            made = self.source.value(made.func.value)
        found = self.source.operation(made)
        if found is not None and found.name in ("sum", "count_nonzero"):
            made = self.source.value(found.operand)
        return self.source.dtype(made) == "integer"
