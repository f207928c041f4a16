"""FL211: autocast is turned off, and nothing is cast to FP32."""

from __future__ import annotations

import ast

from floatline.causes.dtypes import AUTOCAST_REGION_MISUSE
from floatline.lint.reading.autocast_regions import is_disabled, is_in_disabled_region
from floatline.lint.reading.gradients import has_gradient
from floatline.lint.reading.loop_events import dotted
from floatline.lint.reading.reaching import given_to, owned_values
from floatline.lint.reading.silence import asks_for_dtype
from floatline.lint.reading.source_tree import parameters
from floatline.lint.reading.under_autocast import WIDENED, WIDENED_MODULES, is_of_model, shows_narrow
from floatline.lint.reading.values import assignments, reaching_values
from floatline.lint.rule import Holds, Rule

# Layers that hold FP32 weights, and give 16 bits under autocast.
_LAYERS = frozenset(
    "torch.nn." + name
    for name in [
        "Linear",
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "ConvTranspose1d",
        "ConvTranspose2d",
        "ConvTranspose3d",
        "Sequential",
        "MultiheadAttention",
        "LSTM",
        "GRU",
        "RNN",
        "TransformerEncoderLayer",
        "TransformerEncoder",
        "Bilinear",
    ]
)
# They keep the dtype of what they are given.
_KEEPS = frozenset(
    """mean sum max amax flatten view reshape transpose permute squeeze unsqueeze contiguous relu tanh dropout chunk
    split clone expand repeat narrow select t sigmoid abs sqrt clamp clamp_min clamp_max""".split()  # noqa: SIM905
)
# Of two tensors, the wider one decides what they compute in.
_OF_TWO = frozenset(
    """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits kl_div cosine_similarity dist
    pairwise_distance MSELoss L1Loss SmoothL1Loss KLDivLoss BCEWithLogitsLoss CosineSimilarity
    PairwiseDistance""".split()  # noqa: SIM905
)
_PRODUCTS = frozenset(("matmul", "mm", "bmm", "einsum"))  # their sides have one dtype, or the call raises
_DEPTH = 8


class IslandWithoutCast(Rule):
    """Flags what is given 16 bits from outside inside `autocast(enabled=False)`: a layer, or what autocast widens.

    ## Why is this bad?
    Turning autocast off casts nothing. The 16-bit activation from outside meets the FP32 weights of a layer: "mat1 and
    mat2 must have the same dtype". A loss, a sum, an exp or a power is worse off than before: autocast computes them in
    FP32, and here they are computed in the 16 bits that they are given.
    """

    code = "FL211"
    name = "island-without-cast"
    cause = AUTOCAST_REGION_MISUSE
    message = "autocast is off here, but this input is still in 16 bits: it meets FP32 weights, and the call raises"
    advice = "cast at the border: self.head(x.float())"
    words = ("autocast",)
    good = (
        """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    def forward(self, x):
        h = self.body(x)
        with torch.autocast("cuda", enabled=False):
            return self.head(h.float())
""",
        """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    def forward(self, x):
        h = self.body(x)
        with torch.autocast("cuda", enabled=False):
            h = h.to(torch.float32)
            return self.head(h)
""",
        """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 2)
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return self.head(x)
""",
        """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            h = self.body(x.float())
            return self.head(h)
""",
        """
import torch
import torch.nn.functional as F
def loss_of(pred, target):
    with torch.autocast("cuda", enabled=False):
        pred, weight = pred.float(), target.sum()
        return F.mse_loss(pred, target) / weight
with torch.autocast("cuda"):
    loss = loss_of(model(x), y)
""",
        """
import torch
import torch.nn.functional as F
def contrast(image, text, target):
    with torch.autocast("cuda", enabled=False):
        return F.cross_entropy(image.float() @ text.float().t(), target)
with torch.autocast("cuda"):
    loss = contrast(model(x), model(y), target)
""",
        """
import torch
import torch.nn.functional as F
head = torch.nn.Linear(4, 2)
def train(model, x, y):
    with torch.autocast("cuda"):
        h = model(x)
        with torch.autocast("cuda", enabled=False):
            return F.cross_entropy(head(h.float()), y) + F.mse_loss(h, y.float())
""",
        """
import torch
from .blocks import Stream
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Stream(4), torch.nn.Linear(4, 2)
    def forward(self, x):
        h = self.body(x)
        with torch.autocast("cuda", enabled=False):
            return self.head(h)
""",
    )
    bad = (
        """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    def forward(self, x):
        h = self.body(x)
        with torch.autocast("cuda", enabled=False):
            return self.head(h)
""",
        """
from torch import nn
from torch.cuda.amp import autocast as cast
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU())
        self.head = nn.Linear(6, 3)
    def forward(self, x):
        h = self.body(x).mean(-1)
        with cast(enabled=False):
            y = self.head(h)
        return y
""",
        """
import torch
class Net(torch.nn.Module):
    def __init__(self, careful):
        super().__init__()
        self.careful = careful
        self.body, self.head = torch.nn.Conv2d(1, 4, 3), torch.nn.Linear(4, 2)
    def forward(self, x):
        h = torch.relu(self.body(x)).flatten(1)
        with torch.amp.autocast("cuda", enabled=False):
            return self.head(h.float() if self.careful else h)
""",
        """
import torch
import torch.nn.functional as F
def loss_of(logits, target):
    with torch.autocast("cuda", enabled=False):
        return F.cross_entropy(logits / 0.1, target)
with torch.autocast("cuda"):
    loss = loss_of(model(x), y)
""",
        """
import torch as t
head = t.nn.Linear(4, 2)
def train(model, x, y):
    with t.autocast("cuda"):
        h = model(x)
        with t.autocast("cuda", enabled=False):
            return head(h)
""",
        """
import torch
@torch.autocast("cuda", enabled=False)
def energy_of(scores):
    return (scores - 1.0).exp().mean()
def train(q, k):
    with torch.autocast("cuda"):
        return energy_of(q @ k.transpose(-1, -2))
""",
        """
import torch
import torch.nn.functional as F
def contrast(image, text, target):
    with torch.autocast("cuda", enabled=False):
        return F.cross_entropy(image @ text.t(), target)
with torch.autocast("cuda"):
    loss = contrast(model(x), model(y), target)
""",
        """
import torch
def train(model, loader):
    criterion = torch.nn.MSELoss()
    for x in loader:
        with torch.autocast("cuda"):
            first, second = model(x)
        with torch.autocast("cuda", enabled=False):
            loss = criterion(first, second) + ((first - second) ** 2).sum()
        loss.backward()
""",
    )

    def visit_With(self, node: ast.With) -> None:  # noqa: N802
        """A region that is off."""
        if any(is_disabled(self.source, item.context_expr) for item in node.items):
            self._look_into(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:  # noqa: N802
        """A function that is such a region as a whole."""
        if any(is_disabled(self.source, mark) for mark in node.decorator_list):
            self._look_into(node)

    def _look_into(self, region: ast.AST) -> None:
        inside = set(map(id, ast.walk(region)))
        for node in ast.walk(region):
            if not isinstance(node, (ast.Call, ast.BinOp)) or not is_in_disabled_region(self.source, node):
                continue
            if isinstance(node, ast.Call) and node.args and self._is_layer(node.func):
                if self._is_half(node.args[0], inside):
                    self._report_layer(node)
            elif given := self._widened(node):
                if asks_for_dtype(self.source, node) or not has_gradient(self.source, node, surely=False):
                    continue
                if all(self._is_half(one, inside) for one in given):
                    self._report_narrow(node, given[0], "autocast")
                elif all(self._is_half(one, inside, surely=False) for one in given):
                    self._report_narrow(node, given[0], "input")

    def _report_layer(self, node: ast.Call) -> None:
        given, called = self.source.code(node.args[0]), self.source.code(node.func)
        more = ", …" if len(node.args) + len(node.keywords) > 1 else ""
        named = given.isidentifier() and len(called) <= 40
        self.report(node, advice=f"cast at the border: {called}({given}.float(){more})" if named else "")

    def _report_narrow(self, node: ast.Call | ast.BinOp, given: ast.expr, holds: Holds) -> None:
        name = "a power" if isinstance(node, ast.BinOp) else self.source.call_name(node)
        text = self.source.code(given)
        spelled = text if len(text) <= 40 else "what it is given"
        self.report(
            node,
            seen=f"autocast is off here, and nothing casts {spelled}: {name} is computed in its 16 bits, "
            "where autocast would compute it in FP32",
            advice=f"cast at the border: {text}.float()" if spelled.isidentifier() else "cast at the border: x.float()",
            holds=holds,
        )

    def _layers(self, node: ast.AST) -> set[str]:
        """`self.x` that the class makes from a layer with weights."""
        owner = self.source.class_of(node)
        found: set[str] = set()
        for one in ast.walk(owner) if owner is not None else ():
            if not isinstance(one, ast.Assign):
                continue
            for target in one.targets:
                pairs = [(target, one.value)]
                if isinstance(target, ast.Tuple) and isinstance(one.value, ast.Tuple):
                    pairs = list(zip(target.elts, one.value.elts, strict=False))
                for name, value in pairs:
                    if isinstance(value, ast.Call) and self.source.path(value.func) in _LAYERS:
                        found.add(dotted(name))
        return found

    def _is_layer(self, called: ast.expr) -> bool:
        """`self.head`, or `head` of a plain function, where the file makes it from a layer with weights."""
        made = self.source.value(called)
        if isinstance(made, ast.Call) and self.source.path(made.func) in _LAYERS:
            return True
        is_own = isinstance(called, ast.Attribute) and not self.source.path(called)
        return is_own and dotted(called) in self._layers(called)

    def _widened(self, node: ast.Call | ast.BinOp) -> list[ast.expr]:
        """The tensors that something is given that autocast would compute in FP32; none where it is nothing such."""
        if isinstance(node, ast.BinOp):
            return [node.left] if isinstance(node.op, ast.Pow) else []
        made = self.source.value(node.func)
        name = self.source.call_name(made if isinstance(made, ast.Call) else node)
        path = self.source.path(node.func)
        if isinstance(made, ast.Call):  # loss_fn = nn.MSELoss()
            given = node.args if name in WIDENED_MODULES and self.source.path(made.func).startswith("torch.") else []
        elif name not in WIDENED:
            given = []
        elif path:
            given = node.args if path.startswith("torch.") else []
        else:
            given = [node.func.value, *node.args] if isinstance(node.func, ast.Attribute) else []
        given = given[: 2 if name in _OF_TWO else 1]
        return [] if any(isinstance(one, ast.Starred) for one in given) or self.source.dtype(node) == "wide" else given

    def _is_half(self, node: ast.expr, inside: set[int], *, surely: bool = True, depth: int = 0) -> bool:
        """Whether a layer or product outside the region made it, and nothing cast it since.

        Args:
            node: The value.
            inside: The nodes of the region.
            surely: Whether the file must show what made it; else the name of a parameter is enough.
            depth: How many values lie between it and what was asked for.
        """
        if depth > _DEPTH or self.source.dtype(node):  # who casts to 16 bits means it
            return False
        if isinstance(node, ast.IfExp):
            return any(self._is_half(one, inside, surely=surely, depth=depth + 1) for one in (node.body, node.orelse))
        if isinstance(node, ast.Name):
            values = self._values(node)
            if not values and not surely:
                return is_of_model(self.source, node)
            return bool(values) and all(self._is_half(one, inside, surely=surely, depth=depth + 1) for one in values)
        if id(node) not in inside:
            is_cast = isinstance(node, ast.Call) and "cast" in self.source.call_name(node)
            return not is_cast and not self._is_of_block(node) and shows_narrow(self.source, node, surely=surely)
        made = self._kept(node)
        return bool(made) and all(self._is_half(one, inside, surely=surely, depth=depth + 1) for one in made)

    def _is_of_block(self, node: ast.expr) -> bool:
        """Whether `self.body` makes it, and is no layer of torch: it may add 16 bits to a stream in FP32."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or self.source.path(node.func):
            return False
        made = [one for one in owned_values(self.source, node.func) if isinstance(one, ast.Call)]
        return any(not self.source.path(one.func).startswith("torch.") for one in made)

    def _values(self, node: ast.Name) -> list[ast.expr]:
        """What a name holds before its own statement: what it was assigned, is part of, or is given as a parameter."""
        if values := [one for one in reaching_values(self.source, node) if one is not None]:
            return values
        function = self.source.function(node)
        if not isinstance(function, ast.Module) and node.id in parameters(function):
            return [one for one in given_to(self.source, function, node.id) if not isinstance(one, ast.Constant)]
        before = [at for at, _ in assignments(self.source, function).get(node.id, ())]
        return [at.value for at in before if isinstance(at, ast.Assign) and (at.end_lineno or 0) < node.lineno]

    def _kept(self, node: ast.expr) -> list[ast.expr]:
        """The tensors whose dtype an expression has; none where it is not known."""
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            return [node.value] if isinstance(node, ast.Subscript) or node.attr in ("T", "mT") else []
        if isinstance(node, ast.UnaryOp):
            return [node.operand]
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Pow):
            return [one for one in (node.left, node.right) if self.source.number(one) is None]
        name = self.source.call_name(node) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or name not in _KEEPS | _PRODUCTS:
            return []
        path = self.source.path(node.func)
        given = [one for one in node.args if not isinstance(one, ast.Constant)]
        if not path.startswith("torch."):
            given = [node.func.value, *given] if isinstance(node.func, ast.Attribute) and not path else []
        return given if name in _PRODUCTS else given[:1]
