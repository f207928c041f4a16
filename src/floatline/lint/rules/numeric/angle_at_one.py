"""FL133: the angle of a cosine that may be 1."""

from __future__ import annotations

import ast

from floatline.causes.rounding import ROUNDED_ONTO_SINGULARITY
from floatline.lint.reading.gradients import has_gradient
from floatline.lint.reading.reaching import reached_numbers
from floatline.lint.reading.source import Operation
from floatline.lint.reading.tensors import pass_shapes
from floatline.lint.rule import Rule

_PRODUCTS = frozenset(("cosine_similarity", "matmul", "bmm", "mm", "einsum", "linear", "sum", "dot"))
_WHY = "FP16 rounds cosines above 0.99976 to 1, where the gradient is infinite"
_LARGEST = 1 - 2.0**-12  # what is above rounds to 1 in FP16


class AngleAtOne(Rule):
    """Flags `acos` and `asin` of a cosine that nothing keeps from 1, or only a bound that FP16 rounds to 1.

    ## Why is this bad?
    The derivative of acos and asin at 1 is infinite. FP16 rounds every cosine above 0.99976 to 1, so two vectors with
    an angle below 1.3 degrees are exactly there; `clamp(-1, 1)` lets the gradient through at 1, and 1 - 1e-6 is 1 in
    FP16.
    """

    code = "FL133"
    name = "angle-at-one"
    only_if_selected = True
    holds = "autocast"
    needs_gradient = True
    cause = ROUNDED_ONTO_SINGULARITY
    message = f"the angle of a cosine without a bound: {_WHY}"
    advice = "the cosine and its angle in FP32 with clamp(-1 + 1e-6, 1 - 1e-6), or a bound of 1 - 1e-3 in FP16"
    calls = frozenset(("acos", "arccos", "asin", "arcsin", "acos_", "asin_"))
    good = (
        "import torch\ny = torch.acos(torch.cosine_similarity(x, z).clamp(-0.999, 0.999))",
        "import torch\nc = torch.cosine_similarity(x.float(), z.float()).float()\n"
        "y = torch.acos(c.clamp(-1 + 1e-6, 1 - 1e-6))",
        "import math\nimport torch\ny = math.acos(0.5)",
        "import torch\nwith torch.no_grad():\n    y = torch.acos(torch.cosine_similarity(x, z))",
        "import torch\ny = torch.acos(0.99 * torch.cosine_similarity(x, z))",
    )
    bad = (
        "import torch\ny = torch.acos(torch.cosine_similarity(x, z))",
        (
            "import torch as t\nimport torch.nn.functional as F\nc = F.linear(F.normalize(x), F.normalize(w))\n"
            "y = t.acos(c.clamp(-1 + 1e-6, 1 - 1e-6))"
        ),
        "from torch import arccos\nc = (x * z).sum(-1)\ny = arccos(c.clamp(-1, 1))",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """`acos` and `asin` of a tensor."""
        found = self.source.operation(node)
        if found is None or found.name not in ("acos", "asin") or found.args:
            return
        if self.source.number(found.operand) is not None or not has_gradient(self.source, node):
            return
        wide = self.source.dtype(found.operand) == "wide"
        made = self.source.operation(pass_shapes(self.source, found.operand))
        if made is None:
            return
        if made.name == "clamp":
            most = made.argument(1, "max")
            bounds = [one.number for one in reached_numbers(self.source, most)] if most is not None else []
            bound = max(bounds, default=0.0)
            if bound <= _LARGEST or wide:
                return
            told = f"of what is clamped to {bound:g}" if bound == 1 else f"of what is clamped to {bound!r}, 1 in FP16"
            self.report(node, seen=f"{found.name} {told}: {_WHY}", of=found.operand, is_seldom=True)
        elif self._is_cosine(made) and not wide:
            self.report(
                node, seen=f"{found.name} of a cosine without a bound: {_WHY}", of=found.operand, is_seldom=True
            )

    def _is_cosine(self, made: Operation) -> bool:
        if made.name == "div":
            above = self.source.operation(pass_shapes(self.source, made.operand))
            return above is not None and above.name in _PRODUCTS
        return made.name in _PRODUCTS
