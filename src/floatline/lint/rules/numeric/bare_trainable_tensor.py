"""FL129: a tensor that asks for gradients in a module, and is no parameter."""

from __future__ import annotations

import ast

from floatline.causes.elsewhere import PARAMS_NOT_TRAINED
from floatline.lint.reading.loop_events import dotted
from floatline.lint.reading.source_tree import keyword
from floatline.lint.rule import Bad, Rule

_MAKERS = frozenset(f"torch.{name}" for name in ("rand", "randn", "zeros", "ones", "full", "empty", "tensor", "eye"))
_MOVES = frozenset(("to", "cuda", "half", "float", "double", "bfloat16"))
_MOVED = "on another device or in another format this is a plain tensor made of a parameter: nothing trains it"


class BareTrainableTensor(Rule):
    """Flags `self.scale = torch.ones(4, requires_grad=True)` or `nn.Parameter(x).to(device)` in a module's constructor.

    ## Why is this bad?
    `parameters()` does not list it: no optimizer steps it, no checkpoint holds it, `.to(device)` and `.half()` leave it
    where it was. It receives gradients and stays as it is. `nn.Parameter(x).to(device)` is the parameter where it is on
    that device already, as on a CPU, and a plain tensor everywhere else.

    ## Fix safety
    Unsafe: the forward pass is the same, but the tensor is then trained and saved: old checkpoints lack it.
    """

    code = "FL129"
    name = "bare-trainable-tensor"
    holds = "autocast"
    only_if_selected = True
    cause = PARAMS_NOT_TRAINED
    message = (
        "a tensor with requires_grad=True that is not an nn.Parameter: parameters() leaves it out, nothing trains it"
    )
    advice = "self.scale = torch.nn.Parameter(...)"
    fix_safety = "unsafe"
    words = ("requires_grad", "Parameter")
    good = (
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = nn.Parameter(torch.ones(4), requires_grad=True)",
        "import torch\nclass Plain:\n    def __init__(self):\n        self.scale = torch.ones(4, requires_grad=True)",
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = torch.ones(4, requires_grad=False)",
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n"
        "        probe = torch.ones(4, requires_grad=True)",
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self, device):\n"
        "        super().__init__()\n"
        "        self.scale = nn.Parameter(torch.ones(4).to(device))\n"
        "        self.net = nn.Linear(4, 4).to(device)",
    )
    bad = (
        Bad(
            "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.scale = torch.ones(16, requires_grad=True)\n    def forward(self, x):\n"
            "        return x * self.scale.to(x.dtype)\ny = Net()(x).detach()",
            fixed="import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.scale = nn.Parameter(torch.ones(16))\n    def forward(self, x):\n"
            "        return x * self.scale.to(x.dtype)\ny = Net()(x).detach()",
        ),
        Bad(
            "import torch as t\nclass Net(t.nn.Module):\n    def __init__(self, d):\n        super().__init__()\n"
            "        self.w = t.tensor([0.5] * d, requires_grad=True)\n    def forward(self, x):\n"
            "        return x * self.w.to(x.dtype)\ny = Net(16)(x).detach()",
            fixed="import torch as t\nclass Net(t.nn.Module):\n    def __init__(self, d):\n        super().__init__()\n"
            "        self.w = t.nn.Parameter(t.tensor([0.5] * d))\n    def forward(self, x):\n"
            "        return x * self.w.to(x.dtype)\ny = Net(16)(x).detach()",
        ),
        (
            "from torch import nn, zeros\nclass Base(nn.Module):\n    pass\nclass Net(Base):\n    def __init__(self):\n"
            "        super().__init__()\n        self.bias = zeros(16).requires_grad_()"
        ),
        (
            "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self, device):\n"
            "        super().__init__()\n        self.scale = nn.Parameter(torch.empty(4)).to(device)"
        ),
        (
            "import torch\nimport torch.nn as nn\nclass Net(nn.Module):\n    def __init__(self, n):\n"
            "        super().__init__()\n"
            "        self.rows = nn.init.xavier_normal_(torch.rand((n, 4), requires_grad=True)).cuda()"
        ),
    )

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: N802
        """Assignments to self in `__init__`."""
        init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
        if init is None or not self.source.is_module_class(node):
            return
        for part in ast.walk(init):
            if not isinstance(part, ast.Assign) or len(part.targets) != 1:
                continue
            target, value = part.targets[0], part.value
            name = dotted(target)
            if name.startswith("self.") and name.count(".") == 1 and self._is_trainable(value):
                is_plain = isinstance(value, ast.Call) and self.source.path(value.func) in _MAKERS
                moved = _moved_of(value)
                if moved is None:
                    self.report(
                        part, advice=f"{name} = torch.nn.Parameter(...)", fix="bare-parameter" if is_plain else None
                    )
                else:
                    self.report(part, seen=_MOVED, advice=f"{name} = torch.nn.Parameter(x.to(device))")

    def _is_trainable(self, value: ast.expr) -> bool:
        if not isinstance(value, ast.Call):
            return False
        path = self.source.path(value.func)
        if path in _MAKERS:
            return _is_true(keyword(value, "requires_grad"))
        if path.startswith("torch.nn.init."):
            return bool(value.args) and self._is_trainable(value.args[0])
        moved = _moved_of(value)
        if moved is not None:
            return self.source.path(getattr(moved, "func", moved)) == "torch.nn.Parameter" or self._is_trainable(moved)
        if not isinstance(value.func, ast.Attribute) or value.func.attr != "requires_grad_":
            return False
        asked = not value.args or _is_true(value.args[0])
        return asked and self.source.path(getattr(value.func.value, "func", value)) in _MAKERS


def _moved_of(value: ast.expr) -> ast.Call | None:
    """The call whose result is brought to a device or format: `f(x)` in `f(x).to(device)`."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr not in _MOVES:
        return None
    return value.func.value if isinstance(value.func.value, ast.Call) else None


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
