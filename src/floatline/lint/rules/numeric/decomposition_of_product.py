"""FL114: a determinant or decomposition of what autocast has made 16 bits."""

from __future__ import annotations

import ast

from floatline.causes.dtypes import UNSUPPORTED_HALF_OP
from floatline.lint.reading.silence import made_of
from floatline.lint.reading.source import Source
from floatline.lint.reading.tensors import pass_shapes
from floatline.lint.rule import Rule

_NAMES = frozenset(
    """slogdet logdet det inv inverse cholesky cholesky_ex eig eigh eigvals eigvalsh svd svdvals qr solve lstsq
    lu_factor pinv matrix_exp""".split()  # noqa: SIM905
)
_PRODUCTS = frozenset(("matmul", "mm", "bmm", "einsum", "linear", "baddbmm", "addmm"))


class DecompositionOfProduct(Rule):
    """Flags `torch.linalg.slogdet(a @ b)` and other decompositions of a matrix product in a module.

    ## Why is this bad?
    Autocast computes the product in 16 bits, and torch has no 16-bit kernel for determinants, inverses and
    decompositions: "linalg.slogdet: Low precision dtypes not supported. Got Half". In FP32 the same code runs.
    """

    code = "FL114"
    name = "decomposition-of-product"
    holds = "autocast"
    only_if_selected = True
    cause = UNSUPPORTED_HALF_OP
    message = "under autocast the product is 16 bits, and this operation has no 16-bit kernel: it raises"
    advice = "with torch.autocast(device, enabled=False): compute product and decomposition of x.float()"
    calls = _NAMES
    good = (
        "import torch\nfrom torch import nn\nclass M(nn.Module):\n    def forward(self, a):\n"
        "        return torch.linalg.slogdet((a @ a.T).float())",
        "import torch\nfrom torch import nn\nclass M(nn.Module):\n    def forward(self, a):\n"
        "        with torch.autocast('cuda', enabled=False):\n            return torch.linalg.inv(a @ a.T)",
        "import torch\nw = torch.linalg.svd(a @ b)",
        "import torch\nfrom torch import nn\nclass M(nn.Module):\n    def forward(self, a):\n"
        "        a = a.view(4, -1).type(torch.double)\n        a = a - a.mean()\n        return torch.inverse(a @ a.T)",
        "import torch\nfrom torch import nn\nclass M(nn.Module):\n    def forward(self, a):\n"
        "        return torch.linalg.slogdet(a)",
    )
    bad = (
        (
            "import torch\nfrom torch import nn\nclass M(nn.Module):\n    def forward(self, x):\n"
            "        w = self.low @ self.up\n        return x @ w, torch.linalg.slogdet(w)[1]"
        ),
        (
            "import torch as t\nclass M(t.nn.Module):\n    def forward(self, x):\n"
            "        return t.inverse(t.matmul(x, x.T))"
        ),
        (
            "from torch import bmm, nn\nfrom torch.linalg import cholesky as root\nclass M(nn.Module):\n"
            "    def forward(self, x):\n        c = bmm(x, x.mT) / 4\n        return root(c)"
        ),
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """The operation, on what a product made."""
        path = self.source.path(node.func)
        if not path.startswith(("torch.linalg.", "torch.")) or path.rpartition(".")[2] not in _NAMES or not node.args:
            return
        if not self.source.is_module_class(self.source.class_of(node)) or self._is_outside_autocast(node):
            return
        if self._is_product(node.args[0], 4):
            self.report(node)

    def _is_product(self, node: ast.expr, depth: int) -> bool:
        """A matrix product, or one times, plus or by something."""
        if not depth or self.source.dtype(node) == "wide":
            return False
        found = self.source.operation(self.source.value(node))
        if found is None:
            return False
        if found.name in _PRODUCTS:  # autocast leaves FP64 as it is
            return not any(_is_double(self.source, one) for one in made_of(self.source, found.node))
        sides = [found.operand, *found.args[:1]]
        if any(self.source.is_call_to(pass_shapes(self.source, side), "torch.eye") for side in sides):
            return False  # of FP32, which makes the sum FP32
        return found.name in ("add", "sub", "mul", "div") and self._is_product(found.operand, depth - 1)

    def _is_outside_autocast(self, node: ast.AST) -> bool:
        for above in self.source.ancestors(node):
            if isinstance(above, (ast.With, ast.AsyncWith)):
                calls = [item.context_expr for item in above.items if isinstance(item.context_expr, ast.Call)]
                if any("autocast" in self.source.call_name(call) for call in calls):
                    return True
            if isinstance(above, ast.FunctionDef) and any("custom_fwd" in ast.unparse(d) for d in above.decorator_list):
                return True
        return False


def _is_double(source: Source, node: ast.expr) -> bool:
    """`x.double()`, and what names torch.float64."""
    if isinstance(node, ast.Attribute):
        return node.attr == "double" or source.path(node) == "torch.float64"
    return source.path(node) in ("torch.float64", "torch.double")
