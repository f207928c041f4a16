"""FL102: the log of a sigmoid."""

from __future__ import annotations

import ast

from floatline.causes.rounding import ROUNDED_ONTO_SINGULARITY
from floatline.lint.reading.reaching import ZERO_IN_FP16, reached_numbers, reached_zero
from floatline.lint.reading.silence import stays_silent
from floatline.lint.reading.source import Operation
from floatline.lint.rule import Bad, Rule

_WIDTHS = frozenset(("scale", "sigma", "std", "width", "variance", "var"))


class LogOfSigmoid(Rule):
    """Flags `torch.log(torch.sigmoid(x))`, `torch.log(1 - torch.sigmoid(x))` and `torch.log1p(-torch.sigmoid(x))`.

    ## Why is this bad?
    In FP16 sigmoid(x) is 0 below x = -17.33 and 1 above x = 8.31, so log(sigmoid(x)) and log(1 - sigmoid(x)) are -inf
    there. A small number added before the log (1e-8, 1e-15) rounds to 0 and guards nothing.

    ## Fix safety
    Safe: `logsigmoid` is the same function, without the 0 in between. With a guard constant inside the log it is not
    quite the same, and nothing is rewritten.
    """

    code = "FL102"
    name = "log-of-sigmoid"
    holds = "autocast"
    is_of_models = True
    needs_gradient = True
    cause = ROUNDED_ONTO_SINGULARITY
    message = "log(sigmoid(x)) is -inf in FP16 below x = -17.33, where the sigmoid rounds to 0"
    advice = "torch.nn.functional.logsigmoid(x)"
    fix_safety = "safe"
    calls = frozenset(("log", "log1p"))
    words = ("sigmoid", "expit")
    good = (
        "import torch.nn.functional as F\ny = F.logsigmoid(x)",
        "import torch\ny = torch.log(torch.sigmoid(x.float()))",
        "import numpy as np\nimport torch\ny = np.log(sigmoid(x))",
        "import torch\ny = torch.log(1 + torch.sigmoid(x))",
        "import torch\ny = torch.log(2 - torch.sigmoid(x))",
    )
    bad = (
        Bad(
            "import torch as t\ny = t.log(t.sigmoid(x))",
            fixed="import torch as t\ny = t.nn.functional.logsigmoid(x)",
        ),
        Bad(
            "import torch\nimport torch.nn.functional as F\nreal = torch.sigmoid(z)\ny = (1 - real).log()",
            fixed="import torch\nimport torch.nn.functional as F\nreal = torch.sigmoid(z)\ny = F.logsigmoid(-z)",
        ),
        Bad(
            "import torch\nfrom torch.nn import functional as F\ny = torch.log1p(-z.sigmoid())",
            fixed="import torch\nfrom torch.nn import functional as F\ny = F.logsigmoid(-z)",
        ),
        "import torch\nEPS = 1e-15\ny = -torch.log(1 - torch.sigmoid(x) + EPS).mean()",
        "from torch import log, sigmoid\ny = log(sigmoid(x) + 1e-8)",
        (
            "import torch\ndef preference_loss(x):\n    return -torch.log(torch.sigmoid(x) + 1e-8)\n"
            "y = preference_loss(x)"
        ),
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """`log` of what a sigmoid made."""
        outer = self.source.operation(node)
        if outer is None or outer.name not in ("log", "log1p") or outer.args:
            return
        inner, is_guarded = self.source.value(outer.operand), False
        found = self.source.operation(inner)
        if outer.name == "log" and found is not None and found.name in ("add", "clamp", "clamp_min"):
            inner = self._without_guard(found)
            if inner is None:
                return
            is_guarded, inner = True, self.source.value(inner)
            found = self.source.operation(inner)
        is_from_one = False
        if outer.name == "log1p":
            if not isinstance(inner, ast.UnaryOp) or not isinstance(inner.op, ast.USub):
                return
            is_from_one, found = True, self.source.operation(self.source.value(inner.operand))
        elif found is not None and found.name == "sub" and self.source.number(found.operand) == 1:
            is_from_one, found = True, self.source.operation(self.source.value(found.args[0]))
        if found is None or found.name != "sigmoid" or stays_silent(self.source, node, outer.operand, found.operand):
            return
        fix = None if is_guarded else "log-sigmoid"
        is_width = any(isinstance(one, ast.Name) and _is_width(one.id) for one in ast.walk(outer.operand))
        seen = advice = ""
        if is_from_one:
            seen = "log(1 - sigmoid(x)) is -inf in FP16 above x = 8.31, where the sigmoid rounds to 1"
            advice = "torch.nn.functional.logsigmoid(-x)"
        self.report(node, seen=seen, advice=advice, fix=fix, of=found.operand, is_seldom=is_width)

    def _without_guard(self, found: Operation) -> ast.expr | None:
        """`p` of `p + eps` and of `p.clamp(min=eps)`, where FP16 rounds the eps to 0."""
        if found.name != "add":
            least = found.argument(0, "min")
            return found.operand if least is not None and reached_zero(self.source, least) is not None else None
        sides = (found.operand, found.args[0]) if found.args else ()
        for side, eps in (sides, sides[::-1]) if sides else ():
            number = self.source.number(eps)
            if number is None and isinstance(eps, ast.Attribute):
                number = min((one.number for one in reached_numbers(self.source, eps)), default=None)
            if number is not None and 0 < number <= ZERO_IN_FP16:
                return side
        return None


def _is_width(name: str) -> bool:
    """Whether a sigmoid is no probability: a flow's scale or a distribution's width that came to 0 would be useless."""
    return not _WIDTHS.isdisjoint(name.lower().rstrip("s").split("_"))
