"""FL222: a layer is replaced after the optimizer was built."""

from __future__ import annotations

import ast

from floatline.causes.elsewhere import PARAMS_NOT_TRAINED
from floatline.lint.rule import Rule

_IMPORTS = "import torch\nfrom torch import nn\n"


class ModuleReplacedAfterOptimizer(Rule):
    """Flags `model.head = nn.Linear(…)` behind `optimizer = torch.optim.SGD(model.parameters(), …)`.

    ## Why is this bad?
    The optimizer holds the parameters of the old layer. The new one gets gradients and is never updated; the loss
    stays where it is, in every precision, and it looks like gradients that vanish.
    """

    code = "FL222"
    name = "module-replaced-after-optimizer"
    cause = PARAMS_NOT_TRAINED
    message = "the optimizer was built before: it holds the parameters of the old layer, and never updates the new one"
    advice = "replace the layer first, or optimizer.add_param_group({'params': model.head.parameters()})"
    words = ("torch.optim", "from torch import optim", "optim.")
    good = (
        _IMPORTS + "model.head = nn.Linear(8, 4)\nopt = torch.optim.SGD(model.parameters(), 0.1)",
        _IMPORTS + "opt = torch.optim.SGD(model.parameters(), 0.1)\nmodel.head = nn.Linear(8, 4)\n"
        "opt.add_param_group({'params': model.head.parameters()})",
        _IMPORTS + "opt = torch.optim.SGD(model.parameters(), 0.1)\nmodel.head = nn.Linear(8, 4)\n"
        "opt = torch.optim.SGD(model.parameters(), 0.1)",
        _IMPORTS + "opt = torch.optim.SGD(model.parameters(), 0.1)\nother.head = nn.Linear(8, 4)",
        _IMPORTS + "opt = torch.optim.SGD(model.body.parameters(), 0.1)\nmodel.head = nn.Linear(8, 4)",
    )
    bad = (
        _IMPORTS + "opt = torch.optim.SGD(model.parameters(), 0.1)\nmodel.head = nn.Linear(8, 4)",
        (
            "from torch import nn as layers\nfrom torch.optim import AdamW as Best\ndef f(m):\n"
            "    opt = Best(m.head.parameters(), 0.1)\n    m.head = layers.Linear(8, 4)\n    return opt"
        ),
        (
            _IMPORTS + "opt = torch.optim.Adam(net.parameters())\n"
            "net.body.out = nn.Sequential(nn.ReLU(), nn.Linear(8, 4))"
        ),
    )

    def visit_Module(self, node: ast.Module) -> None:  # noqa: N802
        """The top of the file."""
        self._check(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:  # noqa: N802
        """Every function."""
        self._check(node.body)

    def _check(self, body: list[ast.stmt]) -> None:
        """Statements that follow each other for certain: those of one block."""
        held: list[str] = []
        replaced: list[tuple[ast.stmt, str]] = []
        for statement in body:
            text = ast.unparse(statement) if held else ""
            if held and (".add_param_group(" in text or self._find_owners(statement)):
                replaced.clear()  # the new layer may be in it
            held += self._find_owners(statement)
            if not held or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                continue
            target = statement.targets[0]
            if isinstance(target, ast.Attribute) and self._is_layer(statement.value):
                name = ast.unparse(target)
                if any(name == owner or name.startswith(f"{owner}.") for owner in held):
                    replaced.append((statement, name))
        for statement, _ in replaced:
            self.report(statement)

    def _find_owners(self, statement: ast.stmt) -> list[str]:
        """Whose parameters an optimizer is built from here: 'model' of `SGD(model.parameters())`."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not isinstance(statement.value, ast.Call):
            return []
        call = statement.value
        if not self.source.path(call.func).startswith("torch.optim.") or "lr_scheduler" in self.source.path(call.func):
            return []
        return [
            ast.unparse(inner.func.value)
            for inner in call.args[:1]
            if isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Attribute)
            and inner.func.attr == "parameters"
            and not inner.args
        ]

    def _is_layer(self, node: ast.expr) -> bool:
        path = self.source.path(node.func) if isinstance(node, ast.Call) else ""
        last = path.rpartition(".")[2]
        return path.startswith("torch.nn.") and last[:1].isupper() and last not in ("Identity", "Parameter", "Flatten")
