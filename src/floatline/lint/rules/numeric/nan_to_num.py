"""FL127: nan_to_num on what is trained."""

from __future__ import annotations

import ast

from floatline.causes.overflow import ACTIVATION_OVERFLOW
from floatline.lint.reading.gradients import has_gradient
from floatline.lint.reading.tensors import pass_shapes
from floatline.lint.rule import Rule

# Rows of these are NaN where a mask leaves nothing, whatever the precision; and a quotient is told by its own rule.
_BY_DESIGN = frozenset(("softmax", "scaled_dot_product_attention", "log_softmax"))


class NanToNum(Rule):
    """Flags `nan_to_num` on activations, losses and gradients.

    ## Why is this bad?
    It puts a constant where a number was lost, and the gradient of a constant is 0: what overflowed cannot learn its
    way back, and no step is skipped, so nobody sees it. 300 * 300 in FP16 becomes inf, then 60000 with gradient 0.
    Where a quotient made the NaN, the gradient behind it is still NaN: 0 / 0 goes forward as 0 and backward as NaN.
    """

    code = "FL127"
    name = "nan-to-num"
    holds = "autocast"
    cause = ACTIVATION_OVERFLOW
    message = "nan_to_num puts a constant where FP16 lost a number: its gradient is 0, or NaN behind a division"
    advice = "drop nan_to_num and compute what overflows in FP32 (x.float()); floatline diagnose names the operation"
    calls = frozenset(("nan_to_num", "nan_to_num_"))
    good = (
        "import torch\nwith torch.no_grad():\n    y = torch.nan_to_num(x)",
        "import numpy as np\nimport torch\ny = np.nan_to_num(x)",
        "import torch\ndef load(path):\n    return torch.nan_to_num(torch.load(path))",
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n"
        "        return torch.nan_to_num(torch.softmax(x, dim=-1))",
    )
    bad = (
        (
            "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def forward(self, x, w):\n"
            "        return torch.nan_to_num(x * w, nan=0.0, posinf=6e4, neginf=-6e4)"
        ),
        (
            "import torch.nn.functional as F\nfrom torch import nan_to_num as fix\n"
            "loss = fix(F.cross_entropy(x, labels))\nloss.backward()"
        ),
        "import torch\nfor p in model.parameters():\n    p.grad.nan_to_num_()",
        "import torch\nfor p in model.parameters():\n    p.grad = torch.nan_to_num(p.grad, 0.0)",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """Of a gradient; in a module; or of what backward is called on."""
        found = self.source.operation(node)
        if found is None:
            return
        operand = found.operand
        if isinstance(operand, ast.Attribute) and operand.attr == "grad":
            self.report(
                node,
                seen="nan_to_num of gradients makes steps out of broken ones: the scaler no longer sees an inf to skip",
                advice="let the scaler skip the step: scaler.unscale_(optimizer); scaler.step(optimizer)",
            )
            return
        if not has_gradient(self.source, node):
            return
        made = self.source.operation(pass_shapes(self.source, operand))
        if (made is not None and made.name in _BY_DESIGN) or self._is_attention(operand):
            return
        if self.source.dtype(operand) in ("wide", "integer"):
            return
        if self._is_loss(node):
            self.report(node)
        elif self._is_in_forward(node):  # it may as well clean data that has gaps
            self.report(node, holds="half")

    def _is_attention(self, node: ast.expr) -> bool:
        """What an attention returned: its rows are NaN where a mask leaves nothing."""
        return isinstance(node, ast.Name) and any(word in node.id.lower() for word in ("attn", "attention"))

    def _is_in_forward(self, node: ast.AST) -> bool:
        if not self.source.is_module_class(self.source.class_of(node)):
            return False
        function = self.source.function(node)
        return isinstance(function, ast.FunctionDef) and function.name not in ("generate", "sample")

    def _is_loss(self, node: ast.AST) -> bool:
        """Its name is what `.backward()` is called on."""
        statement = self.source.statement(node)
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            return False
        return is_differentiated(self.source.function(node), statement.targets[0].id)


def is_differentiated(function: ast.AST, name: str) -> bool:
    """Whether `name.backward()` or `scaler.scale(name)` stands in a function."""
    for part in ast.walk(function):
        if not isinstance(part, ast.Call) or not isinstance(part.func, ast.Attribute):
            continue
        owner = part.func.value
        if part.func.attr == "backward" and isinstance(owner, ast.Name) and owner.id == name:
            return True
        given = [arg.id for arg in part.args if isinstance(arg, ast.Name)]
        if part.func.attr in ("scale", "backward", "manual_backward") and name in given:
            return True
    return False
