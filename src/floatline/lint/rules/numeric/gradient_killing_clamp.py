"""FL128: a clamp on a loss or on logits."""

from __future__ import annotations

import ast
import math

from floatline.causes.elsewhere import CLAMP_KILLS_GRADIENT
from floatline.lint.reading.gradients import has_gradient
from floatline.lint.reading.reaching import owned_values
from floatline.lint.reading.values import reaching_values
from floatline.lint.rule import Rule
from floatline.lint.rules.numeric.nan_to_num import is_differentiated

_LOSSES = frozenset(
    """cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div ctc_loss
    binary_cross_entropy_with_logits gaussian_nll_loss poisson_nll_loss""".split()  # noqa: SIM905
)
_CRITERIA = ("torch.nn.CrossEntropyLoss", "torch.nn.BCEWithLogitsLoss")
_SELDOM = 10.0  # few logits go beyond, and they stand against others that do not
_OF_LOGITS = frozenset(("softmax", "log_softmax", "cross_entropy", "binary_cross_entropy_with_logits", "logsumexp"))
# What they make is made of the same numbers.
_SHAPES = frozenset(("view", "reshape", "flatten", "transpose", "permute", "contiguous", "float"))
_DEPTH = 6  # of these, one of another


class GradientKillingClamp(Rule):
    """Flags an upper bound on a loss, and bounds on logits before a softmax or cross entropy.

    ## Why is this bad?
    Outside its bounds `clamp` has gradient 0. A loss clamped to at most 6 that starts above it reads 6.0000 for ever,
    and an untrained language model over 50,257 tokens starts at ln(50257) = 10.8. A logit beyond its bound can only be
    moved back by the others.
    """

    code = "FL128"
    name = "gradient-killing-clamp"
    holds = "autocast"
    cause = CLAMP_KILLS_GRADIENT
    message = "a loss or its logits are clamped: beyond the bound the gradient is 0, and nothing brings them back"
    advice = "clip gradients (torch.nn.utils.clip_grad_norm_), not the loss; compute softmax and losses from x.float()"
    calls = frozenset(("clamp", "clamp_", "clamp_max", "clamp_max_", "clip", "clip_"))
    good = (
        "import torch\nimport torch.nn.functional as F\ny = F.cross_entropy(x, labels).clamp(min=0.0)",
        "import torch\nimport torch.nn.functional as F\nloss = F.cross_entropy(x, labels)\n"
        "shown = loss.detach().clamp(max=6.0)",
        "import torch\ny = torch.softmax(x, dim=-1).clamp(1e-4, 1.0)",
        "import torch\nratio = torch.clamp(x, 0.8, 1.2)",
        "import torch\ny = torch.sigmoid(torch.clamp(x, max=0.0))",
        "import torch\nimport torch.nn.functional as F\nbounded = torch.clamp(x, -5, 5)\n"
        "loss = F.cross_entropy((x - bounded.sum()) / 2.0, labels)",
    )
    bad = (
        "import torch.nn.functional as F\nloss = F.cross_entropy(x, labels)\ny = loss.clamp(0, 6)",
        "import torch as t\nloss = t.clamp(criterion(x, labels), max=100.0)\nloss.backward()",
        (
            "import torch\nfrom torch import nn\ncriterion = nn.CrossEntropyLoss()\n"
            "y = torch.clamp(criterion(x, labels), 0.0, 10.0)"
        ),
        "import torch\nlogits = x.clamp(-5, 5)\ny = torch.log_softmax(logits, dim=-1)",
        "import torch\ny = torch.softmax(torch.clamp(x, -10, 10), dim=-1)",
        (
            "import torch\nimport torch.nn.functional as F\n"
            "x = torch.clamp(x, -5, 5)\ny = F.log_softmax(x / temperature, dim=-1)"
        ),
        (
            "import torch\nimport torch.nn.functional as F\nfor x, labels in batches:\n"
            "    loss = F.cross_entropy(x, labels)\n    loss = torch.clamp(loss, 0, 6)\n"
            "    (loss + penalty).backward()"
        ),
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A clamp with an upper bound."""
        found = self.source.operation(node)
        if found is None or found.name not in ("clamp", "clamp_max"):
            return
        high = self.source.number(found.argument(0 if found.name == "clamp_max" else 1, "max"))
        if high is None or math.isinf(high) or not has_gradient(self.source, node):
            return
        if self._is_loss(found.operand, node) or self._is_trained_on(node):
            self.report(
                node,
                seen=f"a loss is clamped to at most {high:g}: above, the gradient is 0, and nothing brings it down",
                advice="clip gradients instead (torch.nn.utils.clip_grad_norm_), and clamp only what is plotted",
            )
            return
        low = self.source.number(found.argument(0, "min")) if found.name == "clamp" else None
        if low is not None and low < 0 < high <= 1000 and self._goes_to_softmax(node):
            self.report(
                node,
                seen=f"logits are clamped to [{low:g}, {high:g}] before a softmax: beyond, their gradient is 0",
                is_seldom=high >= _SELDOM,
                advice="compute it from x.float(); to bound logits smoothly: bound * torch.tanh(x / bound)",
            )

    def _is_criterion(self, call: ast.Call) -> bool:
        """`criterion(x, y)`, with `criterion = nn.CrossEntropyLoss()`."""
        made = [self.source.value(call.func), *owned_values(self.source, call.func)]
        return any(self.source.is_call_to(one, *_CRITERIA) for one in made)

    def _is_loss(self, node: ast.expr, clamp: ast.Call) -> bool:
        """Whether a loss is clamped; what the clamp made in the turn of a loop before does not count."""
        reaching = reaching_values(self.source, node) if isinstance(node, ast.Name) else []
        before = [one for one in reaching if one is not clamp]
        made = before[0] if len(before) == 1 and before[0] is not None else self.source.value(node)
        found = self.source.operation(made)
        if found is not None and found.name in _LOSSES and not found.is_method:
            return True
        if not isinstance(made, ast.Call):
            return False
        maker = self.source.value(made.func)
        path = self.source.path(maker.func) if isinstance(maker, ast.Call) else ""
        return path.startswith("torch.nn.") and path.endswith("Loss")

    def _is_trained_on(self, node: ast.AST) -> bool:
        """loss = clamp(…); loss.backward()."""
        statement = self.source.statement(node)
        if not isinstance(statement, ast.Assign) or statement.value is not node:
            return False
        target = statement.targets[0]
        return isinstance(target, ast.Name) and is_differentiated(self.source.function(node), target.id)

    def _goes_to_softmax(self, node: ast.Call) -> bool:
        """What it made is given to a softmax or a cross entropy in the same function, in any shape, or divided."""
        for part in ast.walk(self.source.function(node)):
            if not isinstance(part, ast.Call):
                continue
            found = self.source.operation(part)
            if self._is_criterion(part) and part.args:
                given = part.args[0]
            elif found is not None and found.name in _OF_LOGITS:
                given = found.operand
            else:
                continue
            if self._is_made_of(given, node):
                return True
        return False

    def _is_made_of(self, given: ast.expr, clamp: ast.Call) -> bool:
        """Whether it is what the clamp made, by its names, its parts and shapes, or times a number."""
        for _ in range(_DEPTH):
            given = self.source.value(given)
            if given is clamp:
                return True
            if isinstance(given, ast.Subscript):
                given = given.value
            elif isinstance(given, ast.BinOp) and isinstance(given.op, (ast.Div, ast.Mult)):
                given = given.left
            elif isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr in _SHAPES:
                given = given.func.value
        return False
