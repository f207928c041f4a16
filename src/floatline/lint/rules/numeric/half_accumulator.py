"""FL126: averages and counters that are kept in 16 bits."""

from __future__ import annotations

import ast

from floatline.causes.rounding import ACCUMULATOR_STAGNATION
from floatline.lint.reading.source_tree import keyword
from floatline.lint.reading.values import assignments
from floatline.lint.rule import Rule

_WRITES = frozenset(("add_", "lerp_", "sub_", "addcmul_"))


class HalfAccumulator(Rule):
    """Flags running averages and counters (`lerp_`, `mul_().add_()`, `+= 1`) in a tensor that was made in 16 bits.

    ## Why is this bad?
    A sum moves only if what is added is at least half a spacing: FP16 cannot add less than 1/4096 of a number, BF16
    less than 1/512. An average with decay 0.9995 from 1 towards 1.5 is 1.388 after 3,000 steps, and FP16 still says
    1.0. A counter that adds 1 stops at 2048 (BF16: 256).
    """

    code = "FL126"
    name = "half-accumulator"
    holds = "autocast"
    cause = ACCUMULATOR_STAGNATION
    message = "a running sum is kept in 16 bits: less than 1/4096 of it (BF16: 1/512) cannot be added"
    advice = "keep it in FP32: dtype=torch.float32, or .float() where it is made"
    calls = _WRITES
    words = ("half", "float16", "bfloat16")
    good = (
        "import torch\nema = x.clone().float()\nema.lerp_(z, 0.0005)",
        "import torch\nh = x.half()\nh.add_(bias)",
        "import torch\nsteps = torch.zeros(1)\nsteps += 1",
        "import torch\nh = torch.zeros(4, dtype=torch.float16)\nh = h + 1",
    )
    bad = (
        "import torch\nema = x.clone().half()\nfor batch in batches:\n    ema.lerp_(z, 0.0005)",
        (
            "import torch as t\nfrom torch import nn\nclass Ema(nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.register_buffer('mean', t.zeros(4, dtype=t.bfloat16))\n"
            "    def forward(self, x):\n        self.mean.mul_(0.999).add_(x.mean(0), alpha=0.001)\n        return x"
        ),
        (
            "import torch\nclass Counter:\n    def __init__(self):\n"
            "        self.seen = torch.zeros(1, dtype=torch.float16)\n"
            "    def count(self):\n        self.seen += 1"
        ),
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """`ema.lerp_(x, w)`, `ema.mul_(decay).add_(x)`, and `ema.add_(x, alpha=small)`."""
        if not isinstance(node.func, ast.Attribute):
            return
        kept = node.func.value
        if node.func.attr != "lerp_":
            inner = kept if isinstance(kept, ast.Call) and isinstance(kept.func, ast.Attribute) else None
            if inner is not None and isinstance(inner.func, ast.Attribute) and inner.func.attr == "mul_":
                kept = inner.func.value
            elif not self._is_small(node):
                return
        if self._is_half(kept):
            self.report(node, seen=self.message.replace("a running sum", self.source.code(kept)))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        """`count += 1`."""
        if not isinstance(node.op, ast.Add) or self.source.number(node.value) is None:
            return
        if self._is_half(node.target) and self._is_repeated(node):
            self.report(node, seen=self.message.replace("a running sum", self.source.code(node.target)))

    def _is_small(self, node: ast.Call) -> bool:
        """alpha=0.001, alpha=1 - decay."""
        alpha = keyword(node, "alpha")
        if alpha is None:
            return False
        number = self.source.number(alpha)
        return number < 0.1 if number is not None else isinstance(alpha, ast.BinOp) and isinstance(alpha.op, ast.Sub)

    def _is_repeated(self, node: ast.AST) -> bool:
        """In a loop, or on something that outlives the call."""
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
            return True
        return any(isinstance(above, (ast.For, ast.While)) for above in self.source.ancestors(node))

    def _is_half(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return self.source.dtype(node) == "half" or self._made_half(node.id, self.source.function(node))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            owner = self.source.class_of(node)
            return owner is not None and self._holds_half(owner, node.attr)
        return False

    def _made_half(self, name: str, around: ast.AST) -> bool:
        """Every plain assignment to the name in the function makes 16 bits."""
        values = [
            value for at, value in assignments(self.source, around).get(name, ()) if not isinstance(at, ast.AugAssign)
        ]
        return bool(values) and all(one is not None and self.source.dtype(one) == "half" for one in values)

    def _holds_half(self, owner: ast.ClassDef, name: str) -> bool:
        kinds: list[str] = []
        for part in ast.walk(owner):
            if isinstance(part, ast.Assign):
                if any(isinstance(target, ast.Attribute) and target.attr == name for target in part.targets):
                    kinds.append(self.source.dtype(part.value))
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and len(part.args) > 1:
                first = part.args[0]
                if part.func.attr == "register_buffer" and isinstance(first, ast.Constant) and first.value == name:
                    kinds.append(self.source.dtype(part.args[1]))
        return bool(kinds) and all(kind == "half" for kind in kinds)
