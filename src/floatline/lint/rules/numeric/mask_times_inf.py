"""FL138: a mask multiplied by infinity."""

from __future__ import annotations

import ast
import math
import re

from floatline.causes.elsewhere import NAN_TIMES_ZERO
from floatline.lint.reading.values import is_tensor, read_number
from floatline.lint.rule import Rule

_MASK = re.compile(r"mask|(?:^|_)pad(?:ding|ded)?(?:_|$)")
_TRIANGLES = ("triu", "tril")


class MaskTimesInf(Rule):
    """Flags `(1 - mask) * float("-inf")`.

    ## Why is this bad?
    0 * inf is NaN, in every precision: the product is NaN wherever the mask has a 0, which is where nothing was to be
    masked. Every score that it is added to is NaN then.
    """

    code = "FL138"
    name = "mask-times-inf"
    holds = "any"
    cause = NAN_TIMES_ZERO
    message = "0 * inf is NaN: the product is NaN wherever the mask is 0"
    advice = 'scores.masked_fill(mask == 0, float("-inf")), or torch.where'
    words = ("inf",)
    good = (
        'import torch\ny = x.masked_fill(mask == 0, float("-inf"))',
        'import torch\ny = torch.triu(torch.full((n, n), float("-inf")), diagonal=1)',
        "import math\nimport torch\nbest = sign * math.inf\nworst = -1 * math.inf",
        'import torch\ny = x + (1 - mask) * -1e4\nz = torch.ones(n) * float("inf")',
        "import math\nlow = (1 - share) * math.inf",
    )
    bad = (
        'import torch\ny = x + (1 - mask) * float("-inf")',
        "import torch\ny = x + -torch.inf * (1.0 - attention_mask[:, None])",
        'import torch as t\nscores = t.einsum("ij,kj->ik", q, k) + ~key_mask * float("-inf")',
        "import math\nimport torch\ncausal = torch.triu(torch.ones(n, n), diagonal=1) * -math.inf",
        'import torch\nlow = float("-inf")\nmask = (ids == 0).float()\nscores += low * mask.unsqueeze(1)',
    )

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """A product with infinity."""
        if not isinstance(node.op, ast.Mult):
            return
        for number, other in ((node.left, node.right), (node.right, node.left)):
            value = read_number(self.source, number)
            if value is not None and math.isinf(value) and self._is_mask(other):
                self.report(node)
                return

    def _is_mask(self, node: ast.expr) -> bool:
        """Whether a factor is a tensor that says by 0 where nothing is masked: by its name, or by how it is made."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return self._is_named(node.operand) or is_tensor(self.source, node.operand)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            return read_number(self.source, node.left) == 1.0 and self._is_named(node.right)
        made = self.source.operation(node)
        if made is not None and made.name in _TRIANGLES:
            return True
        return self._is_named(node)

    def _is_named(self, node: ast.expr) -> bool:
        while isinstance(node, (ast.Subscript, ast.Call)):
            inner = node.func if isinstance(node, ast.Call) else node.value
            node = inner.value if isinstance(inner, ast.Attribute) and isinstance(node, ast.Call) else inner
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        return bool(_MASK.search(name.lower())) and read_number(self.source, node) is None
