"""FL211: autocast is turned off, and nothing is cast to FP32."""

from __future__ import annotations

import ast

from floatline.causes.dtypes import AUTOCAST_REGION_MISUSE
from floatline.lint.reading.autocast_regions import is_disabled
from floatline.lint.reading.loop_events import dotted
from floatline.lint.reading.values import reaching_values
from floatline.lint.rule import Rule

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
    split clone expand repeat narrow select""".split()  # noqa: SIM905
)
_DEPTH = 8


class IslandWithoutCast(Rule):
    """Flags a layer inside `autocast(enabled=False)` that is given what another layer made outside.

    ## Why is this bad?
    Turning autocast off casts nothing. The 16-bit activation from outside meets the FP32 weights of the layer:
    "mat1 and mat2 must have the same dtype".
    """

    code = "FL211"
    name = "island-without-cast"
    cause = AUTOCAST_REGION_MISUSE
    message = "autocast is off here, but this input is still in 16 bits: it meets FP32 weights, and the call raises"
    advice = "cast at the border: self.head(x.float())"
    words = ("enabled=False", "autocast(False")
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
    )

    def visit_With(self, node: ast.With) -> None:  # noqa: N802
        """Calls of the module's layers in a region that is off."""
        if not any(is_disabled(self.source, item.context_expr) for item in node.items):
            return
        layers = self._layers(node)
        if not layers:
            return
        for call in ast.walk(node):
            if not isinstance(call, ast.Call) or dotted(call.func) not in layers or not call.args:
                continue
            if self._is_half(call.args[0], layers, set(map(id, ast.walk(node))), 0):
                self.report(call)

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

    def _is_half(self, node: ast.expr, layers: set[str], inside: set[int], depth: int) -> bool:
        """Whether a layer outside the region made it, and nothing cast it since."""
        if depth > _DEPTH:
            return False
        if isinstance(node, ast.IfExp):
            return any(self._is_half(side, layers, inside, depth + 1) for side in (node.body, node.orelse))
        if isinstance(node, ast.Name):
            values = reaching_values(self.source, node)
            return bool(values) and all(
                value is not None and self._is_half(value, layers, inside, depth + 1) for value in values
            )
        if not isinstance(node, ast.Call):
            return False
        if dotted(node.func) in layers:
            return id(node) not in inside
        path = self.source.path(node.func)
        if path.startswith("torch.") and path.rpartition(".")[2] in _KEEPS and node.args:
            return self._is_half(node.args[0], layers, inside, depth + 1)
        if isinstance(node.func, ast.Attribute) and not path and node.func.attr in _KEEPS:
            return self._is_half(node.func.value, layers, inside, depth + 1)
        return False
