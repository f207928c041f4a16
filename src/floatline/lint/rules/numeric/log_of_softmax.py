"""FL101: the log of a softmax."""

from __future__ import annotations

import ast

from floatline.causes.rounding import ROUNDED_ONTO_SINGULARITY
from floatline.lint.reading.silence import asks_for_dtype, is_cast_around
from floatline.lint.rule import Bad, Rule


class LogOfSoftmax(Rule):
    """Flags `torch.log(torch.softmax(x))`, however it is written.

    ## Why is this bad?
    FP16 rounds probabilities below 2.98e-08 to 0, and log(0) is -inf. The gradient of the log is 1 / p, which
    overflows long before that.

    ## Fix safety
    Safe: `log_softmax` is the same function, without the zero in between.
    """

    code = "FL101"
    name = "log-of-softmax"
    holds = "half"
    needs_gradient = True
    cause = ROUNDED_ONTO_SINGULARITY
    message = (
        "log(softmax(x)) passes through probabilities too small for FP16: below 2.98e-08 they are 0, and log(0) is -inf"
    )
    advice = "torch.nn.functional.log_softmax(x, dim)"
    fix_safety = "safe"
    calls = frozenset(("log",))
    good = (
        "import torch\ny = torch.log_softmax(x, dim=-1)",
        "y = log(softmax(x))",
        "import numpy as np\nimport torch\ny = np.log(softmax(x))",
        "import torch\ny = torch.log(torch.softmax(x.float(), dim=-1))",
    )
    bad = (
        Bad(
            "import torch as t\ny = t.log(t.softmax(x, dim=-1))",
            fixed="import torch as t\ny = t.nn.functional.log_softmax(x, dim=-1)",
        ),
        "from torch import log, softmax\ny = log(softmax(x, dim=-1))",
        Bad(
            "import torch\nimport torch.nn.functional as F\np = F.softmax(x, dim=1)\ny = p.log()",
            fixed="import torch\nimport torch.nn.functional as F\np = F.softmax(x, dim=1)\ny = F.log_softmax(x, dim=1)",
        ),
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """`log` of what a softmax made, in 16 bits or where nothing says otherwise."""
        outer = self.source.operation(node)
        if outer is None or outer.name != "log" or outer.args:
            return
        inner = self.source.operation(self.source.value(outer.operand))
        if inner is None or inner.name != "softmax" or self.source.dtype(outer.operand) == "wide":
            return
        if is_cast_around(self.source, node) or asks_for_dtype(self.source, node):
            return
        self.report(node, fix="log-softmax")
