"""FL122: sums, products and squares of a tensor that the file itself puts into FP16."""

from __future__ import annotations

import ast

from floatline.causes.overflow import REDUCTION_OVERFLOW
from floatline.lint.reading.tensors import is_bfloat16
from floatline.lint.rule import Bad, Rule

_WITH_DTYPE = ("sum", "prod", "cumsum", "cumprod")


class HalfSum(Rule):
    """Flags `sum`, `prod`, `cumsum` and squares of a tensor that was cast to, or made in, FP16.

    ## Why is this bad?
    FP16 ends at 65504: the sum of 70,000 ones is inf, and so is the square of 256. Between 2048 and 4096 only even
    numbers exist, so the sum of 3,001 ones is 3000. Torch adds in FP32 inside, but the result is FP16 again.

    ## Fix safety
    Safe: `dtype=torch.float32` is the same sum with more bits and a larger range; the result is then FP32.
    """

    code = "FL122"
    name = "half-sum"
    holds = "half"
    cause = REDUCTION_OVERFLOW
    message = "the sum of an FP16 tensor is FP16: above 65504 it is inf, above 2048 not every integer exists"
    advice = "sum(..., dtype=torch.float32)"
    fix_safety = "safe"
    calls = frozenset(("sum", "prod", "cumsum", "cumprod", "square", "pow"))
    words = ("half", "float16")
    good = (
        "import torch\ny = x.half().sum(dtype=torch.float32)",
        "import torch\ny = x.half().float().sum(-1)",
        "import numpy as np\nimport torch\ny = np.asarray(x, dtype=np.float16).sum()",
        "import torch\ny = x.half().softmax(-1).sum(-1)",
        "import torch\ny = x.to(torch.bfloat16).sum(-1)",
        "import torch\ny = x.half().mean(-1)",
    )
    bad = (
        Bad(
            "import torch\ny = big.half().abs()[:, :1000].sum(-1)",
            fixed="import torch\ny = big.half().abs()[:, :1000].sum(-1, dtype=torch.float32)",
        ),
        Bad(
            "import torch as t\nh = big.to(t.float16)\ny = t.cumsum(h.abs(), dim=-1)",
            fixed="import torch as t\nh = big.to(t.float16)\ny = t.cumsum(h.abs(), dim=-1, dtype=t.float32)",
        ),
        "from torch import half\nh = big.to(half)\ny = h.pow(2)",
        "import torch\nh = torch.ones(100_000, dtype=torch.float16)\ny = h.square()",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A reduction without a dtype of its own."""
        found = self.source.operation(node)
        if found is None or "dtype" in found.keywords or self.source.dtype(found.operand) != "half":
            return
        if found.name == "pow" and (self.source.number(found.argument(0, "exponent")) or 0) < 2:
            return
        inner = self.source.operation(self.source.value(found.operand))
        is_small = inner is not None and inner.name in ("softmax", "normalize", "sigmoid", "one_hot")
        if is_small or is_bfloat16(self.source, found.operand):
            return
        if found.name in _WITH_DTYPE:
            self.report(
                node,
                seen=f"{found.name} of an FP16 tensor is FP16: inf above 65504, and not every integer above 2048",
                advice=f"{found.name}(..., dtype=torch.float32)",
                fix="sum-dtype",
            )
            return
        self.report(
            node,
            seen="the square of an FP16 number from 256 on is inf, below 1.73e-04 it is 0",
            advice="x.float() first",
        )
