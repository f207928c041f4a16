"""FL108: a guard constant that FP16 rounds to zero."""

from __future__ import annotations

import ast

from floatline.causes.underflow import EPS_UNDERFLOW
from floatline.lint.reading.reaching import may_be_tensor, owned_values, reached_zero
from floatline.lint.reading.silence import depends_on_test, made_of, stays_silent
from floatline.lint.reading.source import Operation, Source
from floatline.lint.reading.source_tree import parameters
from floatline.lint.reading.tensors import SHAPES, is_same_name
from floatline.lint.reading.under_autocast import shows_narrow
from floatline.lint.rule import Bad, Holds, Rule

_ROOTS = frozenset(("rsqrt", "sqrt", "reciprocal"))
_CLAMPS = frozenset(("clamp", "clamp_min"))
_DEFAULTS = {"normalize": 1e-12, "cosine_similarity": 1e-8}
_PLACES = {"normalize": 2, "cosine_similarity": 2}
_DEPTH = 8
_OF_TENSORS = frozenset(("shape", "size", "dim", "device", "dtype", "numel", "view", "unsqueeze", "float", "detach"))
_FRACTIONS = frozenset(
    """norm vector_norm std var mean softmax log_softmax softplus sigmoid exp log sqrt rsqrt tanh sin cos normalize
    rand randn rand_like randn_like dropout cdist cosine_similarity interpolate gelu silu erf float double
    half""".split()  # noqa: SIM905
)
_DRAWS = frozenset(("normal", "normal_", "randn", "randn_like"))
_PARAMETERS = ("torch.nn.Parameter", "torch.nn.parameter.Parameter", "torch.nn.ParameterDict", "torch.nn.ParameterList")
_START_AT_ZERO = frozenset(("zeros", "zeros_like", "empty", "empty_like", "new_zeros", "new_empty", "Tensor"))


class SmallEps(Rule):
    """Flags `x / (y + 1e-8)`, `y.clamp(min=1e-12)`, `torch.rsqrt(v + 1e-8)` and `F.normalize(x, eps=1e-12)`.

    ## Why is this bad?
    The smallest number of FP16 is 5.96e-8; 1e-8, and everything else up to 2.98e-8, rounds to 0. What it was to guard
    is divided by 0: 0 / 0 is NaN, x / 0 is inf. `F.normalize` of a row of zeros is NaN with its default of 1e-12, and
    so is `F.cosine_similarity` with its default of 1e-8; the defaults are flagged where the file shows FP16.

    A root is the worst of them: its gradient at 0 is infinite, and that times 0 is NaN. Denominators seldom come to 0:
    of those that were judged one in four could. Under autocast, quotients are told on demand only.

    ## Fix safety
    Unsafe: the sum is formed in FP32, and a quotient goes back to the dtype it had without the guard, where x / 1e-8
    may be inf. Where nothing shows that it is no quotient of two whole numbers, which has none of their dtypes, it is
    left alone.
    """

    code = "FL108"
    name = "small-eps"
    holds = "autocast"
    needs_proof = True
    needs_gradient = True
    cause = EPS_UNDERFLOW
    message = "FP16 rounds this guard to 0, and what it guards is divided by 0"
    advice = "an eps of 1e-4 or more, or the sum and the quotient in FP32: y.float() + eps"
    fix_safety = "unsafe"
    calls = frozenset((*_ROOTS, *_CLAMPS, *_DEFAULTS, "clamp_", "clamp_min_", "clip", "div", "rsqrt_", "sqrt_"))
    words = ("e-", "eps", "EPS", "normalize", "cosine_similarity")
    good = (
        "import torch\ny = x / (z.norm() + 1e-4)",
        "import torch\ny = x / (z.norm().float() + 1e-8)",
        "import torch\ny = x.rsqrt() + 1e-8",
        "import torch\ny = torch.sqrt(torch.relu(model(x)) + 1e-8)",
        "import torch\nmean = total / (count + 1e-8)",
        "import torch.nn.functional as F\ny = F.normalize(x, dim=-1)",
        "import torch.nn.functional as F\ny = F.normalize(x.float(), dim=-1, eps=1e-12)",
        "import torch\nn = mask.long().sum().clamp(min=1e-9)",
        "import torch.nn.functional as F\nu = weight.new_empty(9).normal_(0, 1)\nu = F.normalize(u, dim=0, eps=1e-12)",
        "import torch\nloss = criterion(x, p.clamp(min=1e-12))",
        (
            "import torch\nfrom torch import nn\n\n\nclass Snake(nn.Module):\n    def __init__(self, d):\n"
            "        super().__init__()\n        self.a = nn.Parameter(torch.ones(d))\n"
            "        self.b = nn.Parameter(torch.zeros(d))\n\n    def forward(self, x):\n"
            "        b = torch.exp(self.b.unsqueeze(0))\n"
            "        return x / (self.a + 1e-9) + (1.0 / (b + 1e-9)) * x.sin()"
        ),
        (
            "import torch\nfrom geometry import Frame\n\nframes = Frame.of_points(x)\nv = frames[..., None].apply(z)\n"
            "y = torch.rsqrt(torch.sum(v**2, dim=-1) + 1e-20)"
        ),
        (
            "import torch\nfrom torch import nn\n\n\nclass Vocoder(nn.Module):\n    def forward(self, x):\n"
            "        return x / (x.norm(dim=-1, keepdim=True) + 1e-8)\n\n\nclass Model(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n        self.vocoder = Vocoder()\n"
            "        self.vocoder.float()"
        ),
    )
    bad = (
        Bad(
            "import torch as t\nlength = t.norm(zeros, dim=-1, keepdim=True)\ny = zeros / (length + 1e-8)",
            fixed=(
                "import torch as t\nlength = t.norm(zeros, dim=-1, keepdim=True)\n"
                "y = (zeros / (length.to(t.promote_types(length.dtype, t.float32)) + 1e-8))"
                ".to(t.result_type(zeros, length))"
            ),
        ),
        Bad(
            "import torch\nv = zeros.norm(dim=-1, keepdim=True)\ny = (z - z) * torch.rsqrt(v + 1e-12)",
            fixed="import torch\nv = zeros.norm(dim=-1, keepdim=True)\n"
            "y = (z - z) * torch.rsqrt(v.to(torch.promote_types(v.dtype, torch.float32)) + 1e-12)",
        ),
        Bad(
            "import torch\nimport torch.nn.functional as F\ny = F.normalize(zeros, dim=-1, eps=1e-12)",
            fixed="import torch\nimport torch.nn.functional as F\n"
            "y = F.normalize(zeros.to(torch.promote_types(zeros.dtype, torch.float32)), dim=-1, eps=1e-12)",
        ),
        Bad(
            "import torch\ny = zeros / zeros.norm(dim=-1, keepdim=True).clamp_min(1e-12)",
            fixed=(
                "import torch\ny = (zeros / zeros.to(torch.promote_types(zeros.dtype, torch.float32))"
                ".norm(dim=-1, keepdim=True).clamp_min(1e-12)).to(zeros.dtype)"
            ),
        ),
        "import torch\nhits, num = torch.sum(x, -1), torch.sum(z, -1)\ny = hits / (num + 1e-8)",
        "import torch.nn.functional as F\nv = F.relu(v).half()\nu = F.cosine_similarity(v, w.half())",
        (
            "import torch\nfrom torch import nn\n\n\nclass Unit(nn.Module):\n    def __init__(self, eps=1e-8):\n"
            "        super().__init__()\n        self.eps = eps\n\n    def forward(self, x):\n"
            "        size = x.norm(dim=-1, keepdim=True) + self.eps\n        return x / size"
        ),
        (
            "import torch\nfrom torch import nn\n\n\nclass Scaled(nn.Module):\n    def __init__(self, d):\n"
            "        super().__init__()\n        self.width = nn.Parameter(torch.zeros(d))\n\n"
            "    def forward(self, x):\n        width = self.width + 1e-8\n        return x / width"
        ),
        (
            "import torch\nfrom torch import nn\n\n\nclass Unit(nn.Module):\n    def forward(self, x):\n"
            "        size = x.norm(dim=-1, keepdim=True) + 1e-8\n        return x / size\n\n\n"
            "class Vocoder(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n        self.unit = Unit()\n\n\n"
            "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.unit = Unit()\n"
            "        self.vocoder = Vocoder()\n        self.vocoder.float()"
        ),
    )

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """A quotient by a guarded sum."""
        if not isinstance(node.op, ast.Div) or isinstance(node.right, ast.Constant):
            return
        guard = self.source.value(node.right)
        if not isinstance(guard, ast.BinOp) or not isinstance(guard.op, ast.Add):
            return
        self._check_sum(node, guard, node.right)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A root, a clamp, or a function that takes an eps."""
        found = self.source.operation(node)
        if found is None:
            return
        if found.name in _DEFAULTS:
            self._check_default(found)
        elif found.name in _CLAMPS:
            self._check_clamp(found)
        elif found.name in _ROOTS or (found.name == "div" and found.args):
            operand = found.args[0] if found.name == "div" else found.operand
            guard = self.source.value(operand)
            if isinstance(guard, ast.BinOp) and isinstance(guard.op, ast.Add):
                self._check_sum(node, guard, operand)

    def _check_sum(self, node: ast.expr, guard: ast.BinOp, written: ast.expr) -> None:
        for value, eps in ((guard.left, guard.right), (guard.right, guard.left)):
            if (
                not isinstance(eps, (ast.Constant, ast.Name, ast.Attribute))
                or (small := reached_zero(self.source, eps)) is None
            ):
                continue
            is_tensor = (
                may_be_tensor(self.source, value)
                or _is_used_as_tensor(self.source, value)
                or (_is_root(self.source, node) and _is_matrix_product(self.source, value))
            )
            if not is_tensor and not _may_be_given_tensor(self.source, value):
                return
            if stays_silent(self.source, node, value):
                return
            if depends_on_test(self.source, node, value) or _is_learned_scale(self.source, value):
                return
            if _is_of_other_file(self.source, value) or _is_root_of_relu(self.source, node, value):
                return
            what = f"{small:.3g} added to {self._spell(value)} rounds to 0 in FP16"
            seldom = not _is_root(self.source, node)
            if guard is not written or not is_tensor:
                holds: Holds | None = None if is_tensor else "input"
                seen = f"{what}: the guard is not there"
                self.report(node, seen=seen, of=value, by=eps, holds=holds, is_seldom=seldom)
                return
            above = node.left if isinstance(node, ast.BinOp) else None
            is_quotient = isinstance(above, (ast.Name, ast.Attribute))
            told = "at 0 this divides by 0" if is_quotient else "the guard is not there"
            place = node if is_quotient else guard
            whole = isinstance(above, (ast.Name, ast.Attribute)) and not _is_floating(self.source, above, value)
            fix = None if whole else "small-eps"
            self.report(place, seen=f"{what}: {told}", fix=fix, of=value, by=eps, is_seldom=seldom)
            return

    def _check_clamp(self, found: Operation) -> None:
        eps = found.argument(0, "min")
        small = None if eps is None else reached_zero(self.source, eps)
        if small is None or stays_silent(self.source, found.node, found.operand) or self._is_in_log(found.node):
            return
        seen = f"a clamp to {small:.3g} is a clamp to 0 in FP16"
        above = self.source.parents.get(found.node)
        if isinstance(above, ast.AugAssign) or (isinstance(above, ast.BinOp) and isinstance(above.op, ast.Add)):
            return  # a sum does not care whether it is given 1e-12 or 0
        if isinstance(above, ast.Call) and found.node in above.args and self.source.operation(above) is None:
            return  # what it is handed to is not shown to divide by it
        is_divided = isinstance(above, ast.BinOp) and isinstance(above.op, ast.Div) and above.right is found.node
        if is_divided and isinstance(above, ast.BinOp) and isinstance(above.left, (ast.Name, ast.Attribute)):
            fix = "small-eps" if _is_floating(self.source, above.left, found.operand) else None
            self.report(above, seen=seen, fix=fix, of=found.operand, by=eps, is_seldom=True)
        else:
            fix = None if found.is_in_place else "small-eps"
            seldom = not _is_under_root(self.source, found.node)
            self.report(found.node, seen=seen, fix=fix, of=found.operand, by=eps, is_seldom=seldom)

    def _check_default(self, found: Operation) -> None:
        if found.is_method:
            return
        given = found.argument(_PLACES[found.name], "eps")
        if given is None:
            if self.source.dtype(found.operand) != "half":
                return
            small: float | None = _DEFAULTS[found.name]
        else:
            small = reached_zero(self.source, given)
        if small is None or stays_silent(self.source, found.node, found.operand):
            return
        if _is_drawn(self.source, found.operand):
            return
        told = "" if given is not None else "the default "
        self.report(
            found.node,
            seen=f"{told}eps={small:g} of {found.name} is 0 in FP16: a row of zeros becomes NaN",
            fix=None if given is None else "small-eps",
            of=found.node,
            by=given,
        )

    def _is_in_log(self, node: ast.AST) -> bool:
        above = self.source.parents.get(node)
        if isinstance(above, ast.Attribute):
            return above.attr in ("log", "log2", "log10", "log_", "log10_", "log2_")
        return isinstance(above, ast.Call) and self.source.call_name(above) in ("log", "log2", "log10")

    def _spell(self, node: ast.expr) -> str:
        text = self.source.code(node)
        return text if len(text) <= 40 else "this"


def _is_floating(source: Source, *sides: ast.expr) -> bool:
    """Whether the file shows that one side of a quotient is no whole number: of two such, torch makes FP32.

    The quotient of sums of masks goes back to no dtype of theirs.
    """
    return any(
        source.dtype(side) in ("half", "wide")
        or shows_narrow(source, side)
        or any(_makes_fractions(source, one) for one in made_of(source, side))
        for side in sides
    )


def _makes_fractions(source: Source, node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, float)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div)
    return isinstance(node, ast.Call) and source.call_name(node).rstrip("_") in _FRACTIONS


def _is_root(source: Source, node: ast.AST | None) -> bool:
    """`torch.sqrt(…)` and `x.rsqrt()`: at 0 their gradients are infinite, whatever they are multiplied by."""
    found = source.operation(node)
    return found is not None and found.name in ("sqrt", "rsqrt")


def _is_matrix_product(source: Source, node: ast.expr) -> bool:
    """`x @ w`, which may be numpy's, but not under a root of torch."""
    made = source.value(node)
    return isinstance(made, ast.BinOp) and isinstance(made.op, ast.MatMult)


def _is_root_of_relu(source: Source, node: ast.AST, value: ast.expr) -> bool:
    """`sqrt(relu(x) + eps)`: where it is 0 the root's gradient is infinite, and relu selects 0 in its place."""
    found, made = source.operation(node), source.value(value)
    return (
        found is not None and found.name == "sqrt" and isinstance(made, ast.Call) and source.call_name(made) == "relu"
    )


def _is_under_root(source: Source, node: ast.expr) -> bool:
    above = source.parents.get(node)
    return _is_root(source, source.parents.get(above) if isinstance(above, ast.Attribute) else above)


def _is_used_as_tensor(source: Source, node: ast.expr) -> bool:
    """Whether a bare parameter is used as only tensors are: `y.shape`, `y.size(0)`, `torch.relu(y)`."""
    function = source.function(node)
    if not isinstance(node, ast.Name) or node.id not in parameters(function) or source.value(node) is not node:
        return False
    for one in ast.walk(function):
        if isinstance(one, ast.Attribute) and is_same_name(one.value, node) and one.attr in _OF_TENSORS:
            return True
        if not isinstance(one, ast.Call) or not source.path(one.func).startswith("torch."):
            continue
        if any(is_same_name(arg, node) for arg in one.args):
            return True
    return False


def _may_be_given_tensor(source: Source, node: ast.expr) -> bool:
    """Whether a value is a parameter of which nothing says that it is none: `def ratio(x, y): …`."""
    function = source.function(node)
    if not isinstance(function, ast.FunctionDef) or not isinstance(node, ast.Name) or source.value(node) is not node:
        return False
    required = function.args.args[: len(function.args.args) - len(function.args.defaults)]
    return any(one.arg == node.id and one.annotation is None for one in required)


def _is_drawn(source: Source, node: ast.expr) -> bool:
    """Whether a value is drawn from a normal distribution: a row of it is not zero."""
    made = source.value(node)
    return isinstance(made, ast.Call) and source.call_name(made) in _DRAWS


def _is_learned_scale(source: Source, node: ast.expr) -> bool:
    """Whether a value is a learned parameter itself, or its exp.

    Training does not land on 0 exactly, unless it starts there; and where exp rounds to 0, its inverse is inf long
    before. The square or the norm of a parameter is another matter.
    """
    is_exp = False
    for _ in range(_DEPTH):
        node = source.value(node)
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in ("data", "T")):
            node = node.value
        elif isinstance(node, ast.Call):
            is_exp |= source.call_name(node) == "exp"
            inner = _inner(source, node)
            if inner is None:
                return False
            node = inner
    made = [one for one in owned_values(source, node) if source.is_call_to(one, *_PARAMETERS)]
    return bool(made) and (is_exp or not any(_starts_at_zero(source, one) for one in made))


def _inner(source: Source, node: ast.Call) -> ast.expr | None:
    """x of x.view(1, -1), x.exp(), torch.exp(x) and of `self._shaped(x)`; None where more happens to it."""
    if source.path(node.func):
        return node.args[0] if source.path(node.func) == "torch.exp" and node.args else None
    if not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr in SHAPES or node.func.attr in ("exp", "detach"):
        return node.func.value
    is_own = isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
    return node.args[0] if is_own and len(node.args) == 1 and not node.keywords else None


def _starts_at_zero(source: Source, made: ast.expr) -> bool:
    return any(isinstance(one, ast.Call) and source.call_name(one) in _START_AT_ZERO for one in ast.walk(made))


def _is_of_other_file(source: Source, node: ast.expr) -> bool:
    """Whether a value comes out of a method of an object whose class is another file's: its dtype is not shown here."""
    for one in made_of(source, node):
        if not isinstance(one, ast.Call) or not isinstance(one.func, ast.Attribute):
            continue
        owner = one.func.value
        while isinstance(owner, ast.Subscript):
            owner = owner.value
        if isinstance(owner, ast.Name) and _is_foreign(source, source.value(owner)):
            return True
    return False


def _is_foreign(source: Source, made: ast.expr) -> bool:
    """`Frame(…)` and `Frame.from_points(…)` of an imported class that is not torch's."""
    if not isinstance(made, ast.Call):
        return False
    maker = made.func.value if isinstance(made.func, ast.Attribute) else made.func
    if not isinstance(maker, ast.Name) or not maker.id[:1].isupper() or maker.id in source.classes:
        return False
    return not source.path(maker).startswith("torch.")
