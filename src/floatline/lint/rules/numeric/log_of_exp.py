"""FL107: the log of one plus exp, or of a sum of exp."""

from __future__ import annotations

import ast

from floatline.causes.overflow import EXP_OVERFLOW
from floatline.lint.reading.silence import stays_silent
from floatline.lint.reading.tensors import is_bounded, is_wide, read_exp, read_tensor_operation
from floatline.lint.rule import Bad, Rule


class LogOfExp(Rule):
    """Flags `torch.log(1 + torch.exp(x))`, `torch.log1p(torch.exp(x))` and `torch.log(torch.exp(x).sum(dim))`.

    ## Why is this bad?
    In FP16 exp(x) is inf above x = 11.09, so its log is inf too, though the answer is about x. Below -17.33 exp(x) is
    0: the log of a sum of such is -inf.

    ## Fix safety
    Unsafe: `softplus` returns x above x = 20, where FP32 cannot tell the two apart, and FP64 can. `logsumexp` is the
    same function.
    """

    code = "FL107"
    name = "log-of-exp"
    holds = "half"
    needs_gradient = True
    cause = EXP_OVERFLOW
    message = "log(1 + exp(x)) is inf in FP16 above x = 11.09, where exp(x) is inf"
    advice = "torch.nn.functional.softplus(x)"
    fix_safety = "unsafe"
    calls = frozenset(("log", "log1p"))
    words = ("exp(",)
    good = (
        "import torch\ny = torch.nn.functional.softplus(x)",
        "import torch\ny = torch.log1p(torch.exp(-x.abs())) + x.relu()",
        "import torch\nm = x.amax(-1, keepdim=True)\ny = m + torch.log(torch.exp(x - m).sum(-1, keepdim=True))",
        "import torch\ny = torch.log1p(torch.exp(x.float()))",
        "import math\nimport torch\ny = x + math.log(1 + math.exp(-1))",
        "import torch\n\n\nclass Family:\n    def _log_total(self, x):\n        return torch.log1p(torch.exp(x))",
    )
    bad = (
        Bad(
            "import torch as t\ny = t.log(1 + t.exp(x))",
            fixed="import torch as t\ny = t.nn.functional.softplus(x)",
        ),
        Bad(
            "import torch\nimport torch.nn.functional as F\ny = x.exp().log1p()",
            fixed="import torch\nimport torch.nn.functional as F\ny = F.softplus(x)",
        ),
        Bad(
            "import torch\ny = torch.log(torch.exp(x).sum(dim=-1))",
            fixed="import torch\ny = torch.logsumexp(x, dim=-1)",
        ),
        Bad(
            "import torch\ny = torch.log(torch.sum(torch.exp(x), 1, keepdim=True))",
            fixed="import torch\ny = torch.logsumexp(x, 1, keepdim=True)",
        ),
        "from torch import exp, log1p\ny = log1p(exp(x))",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """The log of what exp made."""
        source = self.source
        outer = source.operation(node)
        if outer is None or outer.name not in ("log", "log1p") or outer.args:
            return
        inner, is_sum = self._exp_in(outer.operand, outer.name)
        if inner is None or source.number(inner) is not None or is_bounded(source, inner):
            return
        if stays_silent(source, node, outer.operand, inner) or is_wide(source, inner):
            return
        if is_sum:
            seen = "log(sum(exp(x))) is inf in FP16 above x = 11.09, and -inf where every x is below -17.33"
            whole = source.operation(source.value(outer.operand))
            if whole is not None and whole.name == "sum":
                self.report(node, seen=seen, advice="torch.logsumexp(x, dim)", fix="log-sum-exp")
            else:
                self.report(node, seen=seen, advice="torch.logsumexp(torch.cat([x, zeros], dim), dim)")
        else:
            self.report(node, fix="softplus")

    def _exp_in(self, node: ast.expr, log: str) -> tuple[ast.expr | None, bool]:
        source = self.source
        if log == "log1p":
            return read_exp(source, node), False
        found = source.operation(source.value(node))
        if found is None:
            return None, False
        if found.name == "sum":
            return read_exp(source, found.operand), True
        if found.name == "add" and found.args:
            for side, number in ((found.operand, found.args[0]), (found.args[0], found.operand)):
                if source.number(number) != 1:
                    continue
                total = read_tensor_operation(source, source.value(side))
                if total is not None and total.name == "sum":
                    return read_exp(source, total.operand), True
                return read_exp(source, side), False
        return None, False
