"""FL109: a GroupNorm whose eps FP16 rounds to zero."""

from __future__ import annotations

import ast

from floatline.causes.underflow import EPS_UNDERFLOW
from floatline.lint.reading.reaching import reached_zero
from floatline.lint.reading.source_tree import keyword
from floatline.lint.rule import Rule


class GroupNormEps(Rule):
    """Flags `nn.GroupNorm(…, eps=1e-8)` and `F.group_norm(…, eps=1e-8)`.

    ## Why is this bad?
    torch's CUDA kernel takes the eps of a GroupNorm in the dtype of its input: in FP16 everything up to 2.98e-8 is 0,
    and a group of equal numbers is divided by the root of 0. LayerNorm, BatchNorm, InstanceNorm and RMSNorm take theirs
    in FP32 there and are not flagged; under autocast GroupNorm runs in FP32 as well, so this is about models whose
    weights are FP16.
    """

    code = "FL109"
    name = "group-norm-eps"
    holds = "half"
    cause = EPS_UNDERFLOW
    message = "GroupNorm takes its eps in the dtype of the input: FP16 rounds it to 0, and a constant group becomes NaN"
    advice = "the default eps of 1e-5"
    calls = frozenset(("GroupNorm", "group_norm"))
    good = (
        "from torch import nn\nnorm = nn.GroupNorm(4, 16, eps=1e-6)",
        "from torch import nn\nnorm = nn.LayerNorm(16, eps=1e-12)",
        "from torch import nn\nnorm = nn.BatchNorm2d(16, eps=1e-8)",
        "import torch\nfrom mine import GroupNorm\nnorm = GroupNorm(4, 16, eps=1e-8)",
    )
    bad = (
        "from torch import nn\nnorm = nn.GroupNorm(4, 16, eps=1e-8)",
        "from torch.nn import GroupNorm as Norm\nEPS = 1e-12\nnorm = Norm(4, 16, EPS)",
        "import torch.nn.functional as F\ny = F.group_norm(x, 4, eps=1e-10)",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A norm with an eps of its own."""
        path = self.source.path(node.func)
        if path not in ("torch.nn.GroupNorm", "torch.nn.functional.group_norm", "torch.group_norm"):
            return
        place = 2 if path == "torch.nn.GroupNorm" else 4
        eps = keyword(node, "eps") or (node.args[place] if len(node.args) > place else None)
        small = None if eps is None else reached_zero(self.source, eps)
        if small is not None:
            self.report(node, seen=f"eps={small:g}: {self.message}")
