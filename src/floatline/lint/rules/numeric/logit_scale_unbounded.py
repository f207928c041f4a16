"""FL112: a learned scale of logits without a bound."""

from __future__ import annotations

import ast

from floatline.causes.overflow import EXP_OVERFLOW
from floatline.lint.reading.reaching import is_parameter, owned_values
from floatline.lint.reading.silence import made_of, stays_silent
from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import read_once
from floatline.lint.rule import Rule

_SCALARS = frozenset(
    ("tensor", "ones", "zeros", "full", "empty", "randn", "rand", "FloatTensor", "Tensor", "as_tensor")
)
_PRODUCTS = frozenset(("matmul", "mm", "bmm", "einsum", "cosine_similarity", "linear"))
_CLAMPS = frozenset(
    ("clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_", "clip", "clip_", "minimum", "min")
)


class LogitScaleUnbounded(Rule):
    """Flags `x * self.scale.exp()` and `x / self.temperature` of a learned scalar that the file nowhere bounds.

    ## Why is this bad?
    A contrastive or attention loss keeps pushing such a scale up, or such a temperature down. In FP16 exp(scale) is inf
    above 11.09, and long before that the scaled logits leave the range: x / temperature is inf where temperature falls
    below |x| / 65504. CLIP clips its scale at 100 (Radford et al. 2021, arXiv:2103.00020).
    """

    code = "FL112"
    name = "logit-scale-unbounded"
    only_if_selected = True
    holds = "half"
    needs_gradient = True
    cause = EXP_OVERFLOW
    title = "A learned logit scale has no bound"
    message = "a learned scale without a bound: FP16 ends at exp(11.09)"
    advice = "self.scale.clamp(max=4.6052).exp(), which is 100 at most"
    words = ("Parameter",)
    calls = frozenset(("exp",))
    good = (
        (
            "import torch\nfrom torch import nn\n\n\nclass Head(nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.scale = nn.Parameter(torch.tensor(2.66))\n\n"
            "    def forward(self, a, b):\n        return a @ b.T * self.scale.clamp(max=4.6).exp()"
        ),
        (
            "import torch\nfrom torch import nn\n\n\nclass Head(nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.register_buffer('scale', torch.tensor(2.66))\n\n"
            "    def forward(self, a, b):\n        return a @ b.T * self.scale.exp()"
        ),
        (
            "import torch\nfrom torch import nn\n\n\nclass Head(nn.Module):\n    def __init__(self, d):\n"
            "        super().__init__()\n        self.log_rate = nn.Parameter(torch.zeros(d))\n\n"
            "    def forward(self, x):\n        return x * self.log_rate.exp()"
        ),
    )
    bad = (
        (
            "import torch\nfrom torch import nn\n\n\nclass Head(nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.logit_scale = nn.Parameter(torch.tensor(2.66))\n\n"
            "    def forward(self, a, b):\n        return a @ b.T * self.logit_scale.exp()"
        ),
        (
            "import torch as t\nfrom torch.nn import Module, Parameter as Learned\n\n\nclass Head(Module):\n"
            "    def __init__(self):\n        super().__init__()\n        self.log_scale = Learned(t.ones([]))\n\n"
            "    def forward(self, a, b):\n        scale = t.exp(self.log_scale)\n        return scale * a @ b.T"
        ),
        (
            "import torch\nfrom torch import nn\n\n\nclass Head(nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.temperature = nn.Parameter(torch.ones(1) * 0.07)\n\n"
            "    def forward(self, a, b):\n        return (a @ b.T / self.temperature).softmax(-1)"
        ),
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """exp of a learned scalar."""
        found = self.source.operation(node)
        if found is None or found.name != "exp" or not self._is_free(found.operand):
            return
        if not any(self._is_matrix_product(one) for one in ast.walk(self.source.function(node))):
            return  # a gain of something else than scores
        if stays_silent(self.source, node, found.operand) or self._is_clamped_after(node):
            return
        name = self.source.code(found.operand)
        self.report(
            node,
            seen=f"exp({name}) of a learned scalar that nothing bounds: in FP16 it is inf above {name} = 11.09",
            advice=f"{name}.clamp(max=4.6052).exp(), which is 100 at most",
        )

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """A quotient by a learned scalar."""
        if (
            not isinstance(node.op, ast.Div)
            or not isinstance(node.right, ast.Attribute)
            or not self._is_free(node.right)
        ):
            return
        if not self._is_product(node.left) or stays_silent(self.source, node, node.left):
            return
        name = self.source.code(node.right)
        self.report(
            node,
            seen=f"a division by {name}, a learned scalar that nothing keeps away from 0",
            advice=f"divide by {name}.clamp(min=0.01)",
        )

    def _is_product(self, node: ast.expr) -> bool:
        """Whether scores are divided: what a product of matrices made."""
        return any(self._is_matrix_product(one) for one in made_of(self.source, node))

    def _is_matrix_product(self, node: ast.AST) -> bool:
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.MatMult)
        return isinstance(node, ast.Call) and self.source.call_name(node) in _PRODUCTS

    def _is_free(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Attribute) or not is_parameter(self.source, node):
            return False
        made = [
            value.args[0] for value in owned_values(self.source, node) if isinstance(value, ast.Call) and value.args
        ]
        return any(self._is_scalar(value) for value in made) and node.attr not in _bounded(self.source)

    def _is_scalar(self, node: ast.expr) -> bool:
        """`torch.tensor(2.66)`, `torch.ones([])`, `torch.ones(1) * 0.07`, `torch.full((), 1.0)`."""
        node = self.source.value(node)
        if isinstance(node, ast.BinOp):
            return self._is_scalar(node.left) or self._is_scalar(node.right)
        if not isinstance(node, ast.Call):
            return False
        path = self.source.path(node.func)
        last = path.rpartition(".")[2]
        if not path.startswith("torch.") or not node.args or last not in _SCALARS:
            return last == "log" and bool(node.args) and self._is_scalar(node.args[0])
        first = node.args[0]
        if isinstance(first, (ast.List, ast.Tuple)):
            return not first.elts or (len(first.elts) == 1 and last in ("tensor", "FloatTensor", "Tensor", "as_tensor"))
        if last in ("tensor", "as_tensor"):
            return True
        return isinstance(first, ast.Constant) and first.value == 1

    def _is_clamped_after(self, node: ast.Call) -> bool:
        """`self.scale.exp().clamp(max=100)`, and the same over a name."""
        for above in self.source.ancestors(node):
            if isinstance(above, ast.Call) and self.source.call_name(above) in _CLAMPS:
                return True
            if isinstance(above, ast.stmt):
                if not isinstance(above, ast.Assign) or not isinstance(above.targets[0], ast.Name):
                    return False
                name = above.targets[0].id
                return any(
                    isinstance(one, ast.Call)
                    and self.source.call_name(one) in _CLAMPS
                    and any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(one))
                    for one in ast.walk(self.source.function(above))
                )
        return False


@read_once
def _bounded(source: Source) -> frozenset[str]:
    """Attributes that something in the file clamps, or writes to."""
    calls = [call for name in _CLAMPS for call in source.calls.get(name, ())]
    return frozenset(inner.attr for call in calls for inner in ast.walk(call) if isinstance(inner, ast.Attribute))
