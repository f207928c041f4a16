"""FL104: a log whose guard constant FP16 cannot hold."""

from __future__ import annotations

import ast

from floatline.causes.underflow import EPS_UNDERFLOW
from floatline.lint.reading.reaching import ZERO_IN_FP16, reached_numbers
from floatline.lint.reading.silence import stays_silent
from floatline.lint.reading.source import Operation
from floatline.lint.rule import Bad, Rule

_LEAST_FOR_GRADIENT = 1 / 65504
_NO_GRADIENT = ("no_grad", "inference_mode")
_REACH_ZERO = frozenset(("softmax", "relu", "exp", "abs", "pow", "square", "prod", "sum", "mean", "gather", "norm"))
_LOGS = frozenset(("log", "log2", "log10"))


class LogOfSmallEps(Rule):
    """Flags `torch.log(x + 1e-8)` and `torch.log(x.clamp(min=1e-8))`.

    ## Why is this bad?
    FP16 rounds 1e-8, and everything else up to 2.98e-8, to 0: the log of 0 is -inf, guard or not. A guard between
    2.98e-8 and 1.53e-5 keeps the value finite (with few bits: 1e-7 is held as 1.19e-7), but the derivative at 0 is
    1 / eps, which is beyond 65504: the gradient is inf.

    ## Fix safety
    Unsafe: the sum is formed in FP32, so the result is FP32 as well, and what follows may expect 16 bits. The value is
    fixed, the gradient is not where 16 bits have made a 0: 1 / eps is inf when it is cast back, and 0 * inf is NaN.
    """

    code = "FL104"
    name = "log-of-small-eps"
    holds = "autocast"
    needs_proof = True
    needs_16_bits = True
    needs_gradient = True
    cause = EPS_UNDERFLOW
    message = "the guard inside the log rounds to 0 in FP16: log(0) is -inf"
    advice = "log_softmax / logsigmoid of the logits, or logits.float() before the probability is formed"
    fix_safety = "unsafe"
    calls = _LOGS
    good = (
        "import torch\ny = torch.log(p + 1e-4)",
        "import torch\ny = torch.log(p.float() + 1e-8)",
        "import torch\ny = torch.log(x.clamp(min=1e-6))",
        "import math\nimport torch\ny = math.log(n + 1e-8)",
        "import torch\ny = torch.log(torch.sigmoid(x) + 1e-8)",
        "import torch\nwith torch.no_grad():\n    y = torch.log(p + 1e-6)",
    )
    bad = (
        Bad(
            "import torch as t\nw = t.softmax(x, -1)\ny = t.log(w + 1e-8)",
            fixed=(
                "import torch as t\nw = t.softmax(x, -1)\ny = t.log(w.to(t.promote_types(w.dtype, t.float32)) + 1e-8)"
            ),
        ),
        Bad(
            "import torch\ny = torch.log(zeros.clamp(min=1e-10))",
            fixed=(
                "import torch\n"
                "y = torch.log(zeros.to(torch.promote_types(zeros.dtype, torch.float32)).clamp(min=1e-10))"
            ),
        ),
        Bad(
            "import torch\n\n\ndef information(p, eps=1e-12):\n    return -(p + eps).log()\n\n\ny = information(zeros)",
            fixed=(
                "import torch\n\n\ndef information(p, eps=1e-12):\n"
                "    return -(p.to(torch.promote_types(p.dtype, torch.float32)) + eps).log()\n\n\n"
                "y = information(zeros)"
            ),
        ),
        "import torch\nw = x.softmax(-1)\nloss = -torch.log(w + 1e-6).mean()",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """The log of a sum with a small number, or of what was clamped to one."""
        outer = self.source.operation(node)
        if outer is None or outer.name not in _LOGS or outer.args:
            return
        inner = self.source.value(outer.operand)
        found = self.source.operation(inner)
        if found is None or found.name not in ("add", "clamp", "clamp_min"):
            return
        guarded, guard, eps = self._guard(found)
        if eps is None or guarded is None:
            return
        made = self.source.operation(self.source.value(guarded))
        if made is not None and made.name == "sigmoid" or self._is_one_minus_sigmoid(made):  # noqa: RUF021
            return  # the log of a sigmoid has its own rule
        if stays_silent(self.source, node, outer.operand, guarded):
            return
        spelled = self.source.code(inner)
        if eps <= ZERO_IN_FP16:
            direct = inner is outer.operand
            self.report(
                inner if direct else node,
                seen=f"{outer.name}({spelled}): FP16 rounds {eps:.3g} to 0, and the log of 0 is -inf",
                fix="small-eps" if direct else None,
                of=guarded,
                by=guard,
            )
        elif (
            found.name == "add"
            and made is not None
            and made.name in _REACH_ZERO
            and not self._is_without_gradient(node)
        ):
            self.report(
                node,
                seen=f"{outer.name}({spelled}): at 0 the derivative is {1 / eps:.3g}, too large for FP16: it is inf",
                advice="a guard of 1e-4 or more, or log_softmax / logsigmoid of the logits",
                of=guarded,
                by=guard,
            )

    def _guard(self, found: Operation) -> tuple[ast.expr | None, ast.expr | None, float | None]:
        """What is guarded, what guards it, and its number, if FP16 has trouble with it."""
        if found.name == "add":
            sides = (found.operand, found.args[0]) if found.args else ()
            pairs = (sides, sides[::-1]) if sides else ()
        else:
            pairs = ((found.operand, found.argument(0, "min")),)
        for side, guard in pairs:
            if guard is None:
                continue
            small = [one.number for one in reached_numbers(self.source, guard) if 0 < one.number < _LEAST_FOR_GRADIENT]
            if small:
                return side, guard, min(small)
        return None, None, None

    def _is_one_minus_sigmoid(self, made: Operation | None) -> bool:
        if made is None or made.name != "sub" or not made.args:
            return False
        inner = self.source.operation(self.source.value(made.args[0]))
        return inner is not None and inner.name == "sigmoid"

    def _is_without_gradient(self, node: ast.AST) -> bool:
        for above in self.source.ancestors(node):
            if isinstance(above, (ast.With, ast.AsyncWith)) and any(
                ast.unparse(item).rstrip("()").endswith(_NO_GRADIENT) for item in above.items
            ):
                return True
            if isinstance(above, ast.FunctionDef):
                return any(
                    "no_grad" in ast.unparse(one) or "inference_mode" in ast.unparse(one)
                    for one in above.decorator_list
                )
        return False
