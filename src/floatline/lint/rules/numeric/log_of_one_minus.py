"""FL103: the log of one minus a probability."""

from __future__ import annotations

import ast

from floatline.causes.rounding import ROUNDED_ONTO_SINGULARITY
from floatline.lint.reading.reaching import may_be_tensor
from floatline.lint.reading.silence import stays_silent
from floatline.lint.rule import Rule

_LARGEST_BELOW_ONE = 1 - 2.0**-12  # halfway between FP16's last number below 1 and 1
# torch draws these below 1, and FP16 has no number between its last and 1.
_DRAWN = frozenset(("rand", "rand_like", "uniform"))
_QUANTILES = frozenset(("icdf", "ppf", "quantile"))


class LogOfOneMinus(Rule):
    """Flags `torch.log(1 - p)` and `torch.log1p(-p)` of a probability that comes from elsewhere.

    ## Why is this bad?
    Below 1 the numbers of FP16 are 4.9e-4 apart. A probability above 0.99976 rounds to 1, `1 - p` is 0, and its log is
    -inf. A clamp to 1 - 1e-6 does not help: that bound rounds to 1 too. Logs of logits (`logsigmoid(-x)`,
    `log_softmax`) never form the 1; else the log has to be taken in FP32 of a probability that was never rounded.
    """

    code = "FL103"
    name = "log-of-one-minus-probability"
    holds = "autocast"
    needs_gradient = True
    cause = ROUNDED_ONTO_SINGULARITY
    message = "FP16 rounds a probability above 0.99976 to 1: log(1 - p) is -inf there"
    advice = "work from the logits (torch.nn.functional.logsigmoid(-x)), or compute p and its log in FP32"
    calls = frozenset(("log", "log1p"))
    good = (
        "import torch\ny = torch.log1p(p)",
        "import torch\np = p.float()\ny = torch.log(1 - p)",
        "import torch\np = p.clamp(max=0.99)\ny = torch.log(1 - p)",
        "import torch\np = p.clamp(torch.finfo(p.dtype).eps, 1 - torch.finfo(p.dtype).eps)\ny = torch.log1p(-p)",
        "import torch\np = torch.minimum(p, torch.ones_like(p) * 0.99)\ny = torch.log(1 - p)",
        "import torch\nu = torch.rand_like(x)\ny = torch.log1p(-u)",
        "import math\nimport torch\ny = x * math.log(1 - 0.1)",
        "import torch\n\n\ndef icdf(p, rate):\n    return -torch.log1p(-p) / rate",
    )
    bad = (
        "import torch as t\ny = t.log(1 - p)",
        "import torch\ny = (1.0 - x.tanh().pow(2)).log()",
        "import torch\np = p.clamp(1e-6, 1 - 1e-6)\ny = target * p.log() + (1 - target) * torch.log1p(-p)",
        "from torch import log1p\ny = log1p(-p)",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """The log of a difference from 1."""
        outer = self.source.operation(node)
        if outer is None or outer.name not in ("log", "log1p") or outer.args:
            return
        inner = self.source.value(outer.operand)
        if outer.name == "log1p":
            if not isinstance(inner, ast.UnaryOp) or not isinstance(inner.op, ast.USub):
                return
            probability = inner.operand
        else:
            if (
                not isinstance(inner, ast.BinOp)
                or not isinstance(inner.op, ast.Sub)
                or self.source.number(inner.left) != 1
            ):
                return
            probability = inner.right
            # `.log()` of an unknown object that is not torch's is not told apart by its name alone.
            if outer.is_method and not may_be_tensor(self.source, probability):
                return
        if self.source.number(probability) is not None or stays_silent(self.source, node, outer.operand, probability):
            return
        value = self.source.value(probability)
        made = self.source.operation(value)
        if made is not None and made.name == "sigmoid":  # that has its own rule
            return
        if made is None or made.name not in ("clamp", "clamp_max"):
            if not self._is_quantile(node) and not self._may_be_bounded(node, value):
                self.report(node, of=probability)
            return
        most = made.argument(0, "max") if made.name == "clamp_max" else made.argument(1, "max")
        number = self.source.number(most)
        if most is None or number is None or number <= _LARGEST_BELOW_ONE:
            return
        seen = f"log(1 - p) with p clamped to {self.source.code(most)}, which FP16 rounds to 1: it is -inf there"
        self.report(node, seen=seen, of=probability)

    def _is_quantile(self, node: ast.AST) -> bool:
        """An inverse distribution function is inf at 1 by definition."""
        return getattr(self.source.function(node), "name", "") in _QUANTILES

    def _may_be_bounded(self, node: ast.AST, value: ast.expr) -> bool:
        """Whether something keeps it below 1: a draw, a clamp of another kind, or a number that is added."""
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            return True
        if isinstance(value, ast.Attribute):
            return True  # what an object holds may be no probability, or be bounded where it is made
        owner = self.source.class_of(node) or self.source.function(node)
        if isinstance(owner, ast.Module):
            owner = value
        for one in ast.walk(owner):
            name = self.source.call_name(one) if isinstance(one, ast.Call) else ""
            if "clamp" in name or name == "minimum" or name.rstrip("_") in _DRAWN:
                return True
        return False
