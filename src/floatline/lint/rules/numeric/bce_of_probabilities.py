"""FL111: binary cross entropy of probabilities, in 16 bits."""

from __future__ import annotations

import ast

from floatline.causes.rounding import ROUNDED_ONTO_SINGULARITY
from floatline.lint.reading.autocast_regions import AUTOCASTS, is_disabled, is_on
from floatline.lint.reading.silence import stays_silent
from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import read_once
from floatline.lint.rule import Bad, Rule

_MIXED = {"precision": ("16", "16-mixed", "16-true", 16), "mixed_precision": ("fp16",), "fp16": (True,)}


class BceOfProbabilities(Rule):
    """Flags `nn.BCELoss` and `F.binary_cross_entropy` in files that use autocast, or on tensors that are FP16.

    ## Why is this bad?
    On CUDA both raise inside autocast: "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to
    autocast". On FP16 probabilities they do not raise, and are wrong: above a logit of 8.31 the probability is 1, and
    the loss of a negative example jumps from 7.6 to 100, where torch ends the log.

    ## Fix safety
    Unsafe: `binary_cross_entropy_with_logits` is the same function up to a loss of 100, where the other one stops.
    """

    code = "FL111"
    name = "bce-of-probabilities"
    holds = "autocast"
    cause = ROUNDED_ONTO_SINGULARITY
    title = "Binary cross entropy of probabilities in 16 bits"
    message = (
        "binary_cross_entropy raises inside CUDA autocast, and takes FP16 probabilities that are rounded to 0 or 1"
    )
    advice = "torch.nn.functional.binary_cross_entropy_with_logits(logits, target), or nn.BCEWithLogitsLoss"
    fix_safety = "unsafe"
    calls = frozenset(("binary_cross_entropy", "BCELoss"))
    good = (
        "import torch\nimport torch.nn.functional as F\nloss = F.binary_cross_entropy(p, target)",
        (
            "import torch\nimport torch.nn.functional as F\nwith torch.autocast('cuda'):\n    x = net(z)\n"
            "loss = F.binary_cross_entropy_with_logits(x, target)"
        ),
        (
            "import torch\nimport torch.nn.functional as F\nwith torch.autocast('cuda'):\n    x = net(z)\n"
            "    with torch.autocast('cuda', enabled=False):\n        loss = F.binary_cross_entropy(x.float(), target)"
        ),
        (
            "import torch\nfrom torch import nn\nloss_fn = nn.BCELoss()\nwith torch.autocast('cuda'):\n    p = net(z)\n"
            "loss = loss_fn(p.float(), target)"
        ),
    )
    bad = (
        Bad(
            "import torch\nimport torch.nn.functional as F\nwith torch.autocast('cpu', enabled=x.is_cuda):\n"
            "    y = F.binary_cross_entropy(torch.sigmoid(x), target)",
            fixed=(
                "import torch\nimport torch.nn.functional as F\nwith torch.autocast('cpu', enabled=x.is_cuda):\n"
                "    y = F.binary_cross_entropy_with_logits(x, target)"
            ),
        ),
        (
            "import torch as t\nfrom torch.nn import BCELoss as Loss\nfrom torch.cuda.amp import autocast\n"
            "loss_fn = Loss()\nwith autocast():\n    loss = loss_fn(net(x), target)"
        ),
        "import torch\nfrom torch.nn.functional import binary_cross_entropy as bce\np = p.half()\nloss = bce(p, t)",
        (
            "from torch import nn\nfrom lightning import Trainer\ntrainer = Trainer(precision='16-mixed')\n"
            "loss_fn = nn.BCELoss(reduction='none')"
        ),
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """The function, or the making of the loss."""
        source = self.source
        path = source.path(node.func)
        if path in ("torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"):
            if path.endswith("BCELoss"):
                self._check_loss(node)
            elif self._is_harmed(node):
                inner = source.operation(source.value(node.args[0])) if node.args else None
                self.report(node, fix="bce-with-logits" if inner is not None and inner.name == "sigmoid" else None)

    def _check_loss(self, node: ast.Call) -> None:
        above = self.source.parents.get(node)
        target = above.targets[0] if isinstance(above, ast.Assign) else None
        uses: list[ast.Call] = []
        if target is not None:
            spelled = ast.unparse(target)
            uses = [
                one
                for one in ast.walk(self.source.tree)
                if isinstance(one, ast.Call)
                and one.args
                and type(one.func) is type(target)
                and ast.unparse(one.func) == spelled
            ]
        if any(self._is_harmed(use) for use in uses) or (not uses and _is_mixed(self.source)):
            self.report(node)

    def _is_harmed(self, node: ast.Call) -> bool:
        """Whether a loss is computed under autocast, or of FP16 probabilities."""
        operand = node.args[0] if node.args else None
        around = self._autocast_around(node)
        if around is not None:
            return around
        if operand is None or stays_silent(self.source, node, operand):
            return False
        return self.source.dtype(operand) == "half" or _is_mixed(self.source)

    def _autocast_around(self, node: ast.AST) -> bool | None:
        """True inside autocast, False where it is switched off, None where there is none around."""
        for above in self.source.ancestors(node):
            if not isinstance(above, (ast.With, ast.AsyncWith)):
                continue
            for item in above.items:
                if self.source.is_call_to(item.context_expr, *AUTOCASTS):
                    return not is_disabled(self.source, item.context_expr)
        return None


@read_once
def _is_mixed(source: Source) -> bool:
    """Whether anything in the file switches 16 bits on."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        if is_on(source, node):
            return True
        for word in node.keywords:
            if word.arg in _MIXED and isinstance(word.value, ast.Constant) and word.value.value in _MIXED[word.arg]:
                return True
    return False
