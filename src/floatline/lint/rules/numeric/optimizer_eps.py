"""FL110: an optimizer whose eps is zero in FP16, on FP16 parameters."""

from __future__ import annotations

import ast

from floatline.causes.underflow import OPTIMIZER_STATE_UNDERFLOW
from floatline.lint.reading.reaching import DEFAULT_EPS, ZERO_IN_FP16, reached_numbers
from floatline.lint.reading.source_tree import given_dtypes, keyword
from floatline.lint.rule import Rule

# These keep FP32 copies of the weights by themselves.
_MASTERS = ("deepspeed", "GradScaler", "FullyShardedDataParallel", "master_weight", "fully_shard")


class OptimizerEps(Rule):
    """Flags Adam and its kin, with an eps of 1e-8 or less, over the parameters of a model that the file makes FP16.

    ## Why is this bad?
    The states of torch's optimizers have the dtype of the parameters. In FP16 Adam's 0.001 * g^2 rounds to 0 for a
    gradient below 5.4e-3, and so does an eps of 1e-8: the update is m / 0, and the weight is inf after one step.
    """

    code = "FL110"
    name = "optimizer-eps"
    holds = "autocast"
    cause = OPTIMIZER_STATE_UNDERFLOW
    message = "the parameters are FP16, and so are the optimizer's states: its eps rounds to 0, and steps divide by 0"
    advice = "keep the trained parameters in FP32; or, with FP16 parameters, eps=1e-4 or more"
    calls = frozenset(DEFAULT_EPS)
    words = ("half()", "float16", "16-true")
    good = (
        "import torch\nmodel = Net()\nopt = torch.optim.Adam(model.parameters())\nx = x.half()",
        "import torch\nmodel = Net().half()\nopt = torch.optim.Adam(model.parameters(), eps=1e-4)",
        "import torch\nmodel = Net().bfloat16()\nopt = torch.optim.Adam(model.parameters())  # not float16",
        "import torch\nmodel = Net().half()\nopt = torch.optim.SGD(model.parameters(), 0.1)",
        "import torch\nmodel = Net().half().float()\nopt = torch.optim.AdamW(model.parameters())",
    )
    bad = (
        "import torch\nmodel = Net().cuda().half()\nopt = torch.optim.Adam(model.parameters(), lr=1e-3)",
        (
            "from torch.optim import AdamW as Opt\nimport torch as t\nnet = Net()\nnet.to(t.float16)\n"
            "opt = Opt(net.parameters(), eps=1e-8)"
        ),
        (
            "import torch\nfrom transformers import AutoModel\n"
            "model = AutoModel.from_pretrained(name, dtype=torch.float16)\n"
            "opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)"
        ),
        (
            "import lightning as L\nimport torch\n\n\ndef make(net):\n    return torch.optim.Adam(net.parameters())\n\n"
            "\ntrainer = L.Trainer(precision='16-true')"
        ),
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """An optimizer of torch."""
        kind = self.source.path(node.func).removeprefix("torch.optim.").rpartition(".")[2]
        if not self.source.path(node.func).startswith("torch.optim.") or kind not in DEFAULT_EPS or not node.args:
            return
        if any(word in self.source.text for word in _MASTERS):
            return
        given = keyword(node, "eps")
        eps = [DEFAULT_EPS[kind]] if given is None else [one.number for one in reached_numbers(self.source, given)]
        if not any(0 < number <= ZERO_IN_FP16 for number in eps):
            return
        model = self._model(node.args[0])
        is_half = model is not None and self._is_half(model)
        if not is_half and not self._is_true_half():
            return
        told = "the default " if given is None else ""
        self.report(
            node, seen=f"parameters are FP16, and {told}eps={min(eps):g} of {kind} is 0 there: steps divide by 0"
        )

    def _is_true_half(self) -> bool:
        """Whether a trainer of the file makes every parameter FP16: `Trainer(precision="16-true")`."""
        return "16-true" in self.source.text and any(
            isinstance(one, ast.keyword)
            and one.arg == "precision"
            and isinstance(one.value, ast.Constant)
            and one.value.value == "16-true"
            for one in ast.walk(self.source.tree)
        )

    def _model(self, node: ast.expr) -> ast.Name | None:
        """The name of what `.parameters()` is asked of."""
        for one in ast.walk(self.source.value(node)):
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "parameters":
                return one.func.value if isinstance(one.func.value, ast.Name) else None
        return None

    def _is_half(self, model: ast.Name) -> bool:
        made = self.source.value(model)
        if made is not model and self._ends_in_half(made):
            return not self._is_widened(model)
        function = self.source.function(model)
        for one in ast.walk(function):
            if not isinstance(one, ast.Expr) or not isinstance(one.value, ast.Call) or one.lineno >= model.lineno:
                continue
            is_own = self._is_method_of(one.value.func, model) and self.source.function(one) is function
            if is_own and self._ends_in_half(one.value):
                return not self._is_widened(model)
        return False

    def _ends_in_half(self, node: ast.expr) -> bool:
        """Whether the last cast of a chain of calls is to FP16."""
        while isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "half" and not node.args:
                return True
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("float", "double", "bfloat16"):
                return False
            named = given_dtypes(node)
            if any(self.source.path(arg) in ("torch.float16", "torch.half") for arg in named):
                return True
            if any(self.source.path(arg).startswith("torch.") for arg in named):
                return False
            if not isinstance(node.func, ast.Attribute):
                return False
            node = node.func.value
        return False

    def _is_widened(self, model: ast.Name) -> bool:
        """`p.data = p.float()` anywhere, or `model.float()`: the trained part is FP32."""
        for one in ast.walk(self.source.tree):
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Attribute):
                is_widened = one.targets[0].attr == "data" and "float" in ast.unparse(one.value)
            elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "float":
                is_widened = self._is_method_of(one.func, model)
            else:
                continue
            if is_widened:
                return True
        return False

    @staticmethod
    def _is_method_of(node: ast.expr, model: ast.Name) -> bool:
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == model.id
