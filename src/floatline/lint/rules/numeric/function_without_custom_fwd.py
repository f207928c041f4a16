"""FL131: a custom autograd function that does not know of autocast."""

from __future__ import annotations

import ast

from floatline.causes.dtypes import DTYPE_MISMATCH
from floatline.lint.rule import Rule

_FUNCTIONS = ("torch.autograd.Function", "torch.autograd.function.Function", "torch.autograd.function.InplaceFunction")
_PRODUCTS = frozenset(
    ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "linear", "conv1d", "conv2d", "conv3d", "mv")
)
_KNOWS = frozenset(("custom_fwd", "is_autocast_enabled", "autocast", "get_autocast_dtype", "get_autocast_gpu_dtype"))


class FunctionWithoutCustomFwd(Rule):
    """Flags an `autograd.Function` with matrix products in forward and backward and no `custom_fwd` and `custom_bwd`.

    ## Why is this bad?
    Autocast turns the product in forward into 16 bits, but what was saved for backward is FP32, and backward runs
    without autocast: a half gradient meets an FP32 weight, and torch raises "expected m1 and m2 to have the same
    dtype".
    """

    code = "FL131"
    name = "function-without-custom-fwd"
    only_if_selected = True
    holds = "autocast"
    cause = DTYPE_MISMATCH
    message = "a function multiplies matrices and does not know of autocast: in backward a half meets an FP32 tensor"
    advice = (
        '@torch.amp.custom_fwd(device_type="cuda") on forward and @torch.amp.custom_bwd(device_type="cuda") on backward'
    )
    words = ("autocast", "custom_fwd", "GradScaler")
    good = (
        "import torch\nclass F(torch.autograd.Function):\n    @staticmethod\n"
        "    @torch.amp.custom_fwd(device_type='cuda')\n"
        "    def forward(ctx, x, w):\n        ctx.save_for_backward(x, w)\n        return x @ w\n    @staticmethod\n"
        "    @torch.amp.custom_bwd(device_type='cuda')\n    def backward(ctx, g):\n        x, w = ctx.saved_tensors\n"
        "        return g @ w.T, x.T @ g",
        "import torch\nwith torch.autocast('cuda'):\n    pass\nclass F(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x):\n        return x.sign()\n    @staticmethod\n    def backward(ctx, g):\n"
        "        return g",
        "import torch\nclass F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, w):\n"
        "        ctx.dtype = torch.get_autocast_dtype('cuda') if torch.is_autocast_enabled() else x.dtype\n"
        "        ctx.save_for_backward(x, w)\n        return x.to(ctx.dtype) @ w.to(ctx.dtype)\n    @staticmethod\n"
        "    def backward(ctx, g):\n        x, w = ctx.saved_tensors\n        return g @ w.T, x.T @ g",
    )
    bad = (
        (
            "import torch\nclass F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, w):\n"
            "        ctx.save_for_backward(x, w)\n        return x @ w\n    @staticmethod\n    def backward(ctx, g):\n"
            "        x, w = ctx.saved_tensors\n        return g @ w.T, x.T @ g\nwith torch.autocast('cuda'):\n"
            "    F.apply(x, w)"
        ),
        (
            "import torch as t\nfrom torch.autograd import Function as Fn\nclass F(Fn):\n    @staticmethod\n"
            "    def forward(ctx, x, w):\n        ctx.save_for_backward(x, w)\n        return t.matmul(x, w)\n"
            "    @staticmethod\n"
            "    def backward(ctx, g):\n        x, w = ctx.saved_tensors\n"
            "        return t.matmul(g, w.T), t.matmul(x.T, g)\n"
            "scaler = t.amp.GradScaler()"
        ),
        (
            "import torch\nimport torch.nn.functional as F\nclass Lin(torch.autograd.Function):\n    @staticmethod\n"
            "    def forward(x, w):\n        return F.linear(x, w)\n    @staticmethod\n"
            "    def setup_context(ctx, inputs, output):\n"
            "        ctx.save_for_backward(*inputs)\n    @staticmethod\n    def backward(ctx, g):\n"
            "        x, w = ctx.saved_tensors\n        return g.mm(w), g.t().mm(x)\n"
            "with torch.amp.autocast('cuda'):\n    pass"
        ),
    )

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: N802
        """Functions whose forward and backward multiply matrices."""
        if not any(self.source.path(base) in _FUNCTIONS for base in node.bases):
            return
        methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        forward, backward = methods.get("forward"), methods.get("backward")
        if forward is None or backward is None or not self._multiplies(forward) or not self._multiplies(backward):
            return
        words = {
            one.attr if isinstance(one, ast.Attribute) else one.id
            for one in ast.walk(node)
            if isinstance(one, (ast.Attribute, ast.Name))
        }
        paths = {self.source.aliases.get(word, word).rpartition(".")[2] for word in words}
        if paths & _KNOWS or any("custom_fwd" in word for word in words) or "saved_tensors" not in words:
            return
        if any(isinstance(one, ast.Attribute) and one.attr in ("to", "type_as", "float") for one in ast.walk(backward)):
            return  # it casts what it is given itself
        self.report(node, seen=self.message.replace("a function", node.name))

    def _multiplies(self, function: ast.FunctionDef) -> bool:
        for part in ast.walk(function):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult):
                return True
            if isinstance(part, ast.Call):
                found = self.source.operation(part)
                if found is not None and found.name in _PRODUCTS:
                    return True
        return False
