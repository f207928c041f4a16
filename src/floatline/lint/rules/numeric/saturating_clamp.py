"""FL134: a clamp to the end of FP16."""

from __future__ import annotations

import ast

from floatline.causes.overflow import ACTIVATION_OVERFLOW
from floatline.lint.reading.gradients import has_gradient
from floatline.lint.reading.silence import asks_for_dtype
from floatline.lint.rule import Rule


class SaturatingClamp(Rule):
    """Flags `x.clamp(-65504, 65504)` and a clamp to `torch.finfo(torch.float16).max`: overflow with a cover.

    ## Why is this bad?
    What left FP16's range was inf, and becomes a constant with gradient 0: the unit cannot learn its way back, and the
    loss scaler no longer sees that anything is wrong. NaN passes through a clamp as it is.
    """

    code = "FL134"
    name = "saturating-clamp"
    holds = "autocast"
    cause = ACTIVATION_OVERFLOW
    message = (
        "a clamp to the end of FP16 turns an overflow into a constant with gradient 0, and hides it from the scaler"
    )
    advice = "run the layer that overflows in FP32 or BF16, or make its output smaller; floatline diagnose names it"
    calls = frozenset(("clamp", "clamp_", "clip", "clip_", "clamp_max", "clamp_max_"))
    good = (
        "import torch\ny = x.clamp(-10, 10)",
        "import torch\nwith torch.no_grad():\n    y = x.clamp(-65504, 65504)",
        "import numpy as np\nimport torch\ny = np.clip(x, -65504, 65504)",
        "import torch\ny = x.float().clamp(-65504, 65504).half()",
        "import torch\nlimit = torch.finfo(torch.float8_e4m3fn).max\ny = x.clamp(-limit, limit)",
        "import torch\ny = x.clamp(-65504, 65504).to(torch.float16)",
        "import torch\nsmall = x.detach().clone()\nsmall = small.clamp(-65504, 65504)",
    )
    bad = (
        "import torch\ny = x.clamp(-65504, 65504)",
        "import torch as t\nlimit = t.finfo(t.float16).max\ny = t.clamp(x, min=-limit, max=limit)",
        "from torch import clamp, finfo\nlimit = finfo(x.dtype).max - 1000\ny = clamp(x, min=-limit, max=limit)",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A clamp whose upper bound is 60,000 to 65,504, or a format's largest number."""
        found = self.source.operation(node)
        if found is None:
            return
        high = found.argument(0 if found.name == "clamp_max" else 1, "max")
        if high is None or not self._is_end(high) or self.source.dtype(found.operand) in ("wide", "integer"):
            return
        if has_gradient(self.source, node) and not self._is_cast(node):
            # Under autocast the sums of residual blocks are FP32, and such a test is False.
            self.report(node, holds="half" if asks_for_dtype(self.source, node) else None)

    def _is_cast(self, node: ast.AST) -> bool:
        """x.clamp(-65504, 65504).half(): a cast that does not overflow."""
        above = self.source.parents.get(node)
        return isinstance(above, ast.Attribute) and above.attr in ("half", "to", "type")

    def _is_end(self, node: ast.expr) -> bool:
        number = self.source.number(node)
        if number is not None:
            return 6e4 <= number <= 65504
        made = self.source.value(node)
        if isinstance(made, ast.BinOp) and isinstance(made.op, (ast.Sub, ast.Mult)):
            made = self.source.value(made.left)
        if isinstance(made, ast.Attribute) and made.attr == "max":
            return self._is_float16(self.source.value(made.value))
        found = self.source.operation(made)
        if found is None or found.name != "where":
            return False
        return any(self._is_end(arg) for arg in found.args if not isinstance(self.source.value(arg), ast.Name))

    def _is_float16(self, node: ast.expr) -> bool:
        """finfo(torch.float16), or of the dtype that something has."""
        if not self.source.is_call_to(node, "torch.finfo") or not isinstance(node, ast.Call) or not node.args:
            return False
        dtype = node.args[0]
        return self.source.path(dtype) in ("torch.float16", "torch.half") or (
            isinstance(dtype, ast.Attribute) and dtype.attr == "dtype"
        )
