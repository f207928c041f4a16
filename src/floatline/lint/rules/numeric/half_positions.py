"""FL125: positions and counts in 16 bits."""

from __future__ import annotations

import ast

from floatline.causes.rounding import INTEGER_NOT_EXACT
from floatline.lint.reading.gradients import is_beside_training, is_training_code
from floatline.lint.reading.reaching import is_parameter
from floatline.lint.reading.source_tree import keyword, last_name
from floatline.lint.reading.tensors import SHAPES, is_bfloat16, is_same_name, pass_shapes
from floatline.lint.reading.values import name_of_dtype, reaching_values
from floatline.lint.rule import Holds, Rule

_COUNTERS = ("torch.arange", "torch.randint", "torch.randperm")
_WHY = "FP16 holds every integer only up to 2048, BF16 up to 256; beyond, neighbours are equal"
_EXACT = {"FP16": 2048, "BF16": 256}
# What integers are called: the dtype of such a tensor is theirs.
_INTEGERS = ("ids", "id", "idx", "index", "indices", "mask", "label", "labels", "length", "lengths", "tokens", "token")


class HalfPositions(Rule):
    """Flags `torch.arange(n, dtype=torch.float16)`, and positions cast to 16 bits or to the dtype of a model.

    ## Why is this bad?
    FP16 holds every integer up to 2048, BF16 up to 256: 2049 becomes 2048, and in BF16 257 becomes 256. Neighbouring
    positions, timesteps and ids are then the same number. Rotary angles built from them are equal for neighbours, and
    the product with a frequency keeps 11 bits (BF16: 8) of a number of turns.
    """

    code = "FL125"
    name = "half-positions"
    holds = "autocast"
    only_if_selected = True
    cause = INTEGER_NOT_EXACT
    message = f"integers in 16 bits: {_WHY}"
    advice = "torch.arange(n, dtype=torch.float32), angles in FP32, and cast only their sin and cos"
    calls = frozenset(("arange", "half", "bfloat16", "to", "type", "type_as"))
    words = ("arange", "randint", "randperm", ".sin(", "torch.sin")
    good = (
        "import torch\ny = torch.arange(n, dtype=torch.float32)",
        "import torch\ny = torch.arange(1000, dtype=torch.float16)",
        "import torch\ny = torch.arange(n).to(labels.device)",
        "import torch\ny = (torch.arange(n)[:, None] * freq).sin().half()",
        "import torch\ny = torch.arange(n, dtype=position_ids.dtype)",
        "import torch\ny = (torch.arange(n) % 2).half()",
    )
    bad = (
        "import torch\ny = torch.arange(n, dtype=torch.float16)",
        "import torch as t\npositions = t.arange(n)\ny = positions.to(t.bfloat16) * freq",
        "from torch import arange\ny = arange(0, n, 2).half()",
        (
            "import torch\nangle = t.to(layer.weight.dtype)[:, None] * freq\n"
            "y = torch.cat([angle.sin(), angle.cos()], 1)"
        ),
        (
            "import torch\nfrom torch import nn\nclass Rotary(nn.Module):\n    def forward(self, x):\n"
            "        t = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)\n"
            "        return torch.outer(t, self.inv_freq).cos()"
        ),
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """`arange` with a dtype, and casts of what `arange` made."""
        if self.source.path(node.func) == "torch.arange":
            dtype = keyword(node, "dtype")
            if dtype is not None and (what := self._is_narrow(dtype)) and not self._is_short(node, dtype):
                self._tell(node, node, what)
            return
        if not isinstance(node.func, ast.Attribute) or self.source.path(node.func):
            return
        if node.func.attr == "to" and node.args and self._is_angle_in_half(node):
            self.report(
                node,
                seen=f"an angle is made in the dtype of a weight, before its sin and cos: {_WHY}",
            )
            return
        made = pass_shapes(self.source, node.func.value)
        if not isinstance(made, ast.Call) or self.source.path(made.func) not in _COUNTERS:
            return
        told = keyword(made, "dtype")
        if told is not None and name_of_dtype(self.source, told) in ("wide", "half"):
            return
        if node.func.attr in ("half", "bfloat16"):
            what, dtype = node.func.attr, None
        else:
            found = next(((one, kind) for one in self._dtypes(node) if (kind := self._is_narrow(one))), None)
            if found is None:
                return
            dtype, what = found
        if not self._is_short(made, dtype if dtype is not None else node.func):
            self._tell(node, made, what)

    def _tell(self, node: ast.Call, made: ast.Call, what: str) -> None:
        if what == "a model's dtype" and not self._makes_angles(node) and not self._are_positions(node):
            return
        name = self.source.call_name(made)
        told = f"{name} in {what}" if what == "a model's dtype" else f"{name} in 16 bits"
        follows = [one for one in (*self._dtypes(node), *self._dtypes(made)) if last_name(one) == "dtype"]
        owners = [one.value for one in follows if isinstance(one, ast.Attribute)]
        # A table or a weight is FP32 under autocast.
        is_kept = bool(owners) and all("freq" in last_name(one) or is_parameter(self.source, one) for one in owners)
        holds: Holds = "half" if is_kept else "input" if what == "a model's dtype" else "autocast"
        self.report(node, seen=f"{told}: {_WHY}", holds=holds)

    def _dtypes(self, node: ast.Call) -> list[ast.expr]:
        given = [*node.args, *(word.value for word in node.keywords if word.arg in ("dtype", "other"))]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "type_as" and given:
            return [ast.copy_location(ast.Attribute(given[0], "dtype", ast.Load()), given[0])]
        return given

    def _is_narrow(self, dtype: ast.expr) -> str:
        """'16 bits' where the file says so; "a model's dtype" where it is that of another tensor."""
        kind = name_of_dtype(self.source, dtype)
        if kind:
            return "16 bits" if kind == "half" else ""
        options = [dtype]
        if isinstance(dtype, ast.Name):
            options = [one for one in reaching_values(self.source, dtype) if one is not None]
        for one in options:
            for side in (one.body, one.orelse) if isinstance(one, ast.IfExp) else (one,):
                is_dtype = isinstance(side, ast.Attribute) and side.attr == "dtype" and not _is_of_integers(side.value)
                if is_dtype and name_of_dtype(self.source, side) == "":
                    return "a model's dtype"
        return ""

    def _is_short(self, made: ast.Call, dtype: ast.expr) -> bool:
        """Whether the end is a number that the format holds, or shown to be small."""
        ends = [self.source.number(arg) for arg in made.args[:2]]
        name = self.source.call_name(made)
        last = ends[0] if len(ends) == 1 or name == "randperm" else ends[1] if ends else None
        narrow = is_bfloat16(self.source, dtype)
        return last is not None and last <= _EXACT["BF16" if narrow else "FP16"]

    def _makes_angles(self, node: ast.expr) -> bool:
        """Whether the positions are multiplied in this function, and a sin or cos is taken in it.

        An arange in the exponent of a frequency counts channels, and those are few.
        """
        function = self.source.function(node)
        if (
            not is_training_code(self.source)
            or is_beside_training(self.source, node)
            or not _words_of(function) & {"sin", "cos", "polar"}
        ):
            return False
        statement = self.source.statement(node)
        if self._is_in_exponent(node):
            return False
        for part in ast.walk(function):
            if isinstance(part, ast.Call) and self.source.call_name(part) in ("outer", "ger", "einsum", "matmul"):
                sides = part.args
            elif isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Mult, ast.MatMult)):
                sides = [part.left, part.right]
            else:
                continue
            bases = [_base(side) for side in sides]
            made = [
                self.source.parents.get(self.source.value(one)) if isinstance(one, ast.Name) else None for one in bases
            ]
            if any(one is node for one in bases) or (isinstance(statement, ast.Assign) and statement in made):
                return True
        return False

    def _are_positions(self, node: ast.expr) -> bool:
        """Whether they are named so, or subtracted from each other: `i = arange(T, dtype=x.dtype); i[:, None] - i`."""
        statement = self.source.statement(node)
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            return False
        if not is_training_code(self.source) or is_beside_training(self.source, node) or self._is_in_exponent(node):
            return False
        name = statement.targets[0]
        if {"pos", "position", "positions"} & set(name.id.lower().split("_")):
            return True
        return any(
            isinstance(part, ast.BinOp)
            and isinstance(part.op, ast.Sub)
            and all(is_same_name(_base(side), name) for side in (part.left, part.right))
            for part in ast.walk(self.source.function(node))
        )

    def _is_angle_in_half(self, node: ast.Call) -> bool:
        """`angle = t.to(weight.dtype)[:, None] * freq`, and then the sin or cos of it."""
        dtype = node.args[0]
        options = (
            [one for one in reaching_values(self.source, dtype) if one] if isinstance(dtype, ast.Name) else [dtype]
        )
        sides = [side for one in options for side in ((one.body, one.orelse) if isinstance(one, ast.IfExp) else (one,))]
        if not any(_is_of_weight(side) or name_of_dtype(self.source, side) == "half" for side in sides):
            return False
        above: ast.AST | None = node
        while isinstance(above, (ast.Call, ast.Subscript, ast.Attribute)):
            above = self.source.parents.get(above)
        if not isinstance(above, ast.BinOp) or not isinstance(above.op, ast.Mult):
            return False
        statement = self.source.parents.get(above)
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            return False
        for part in ast.walk(self.source.function(node)):
            if isinstance(part, ast.Call) and self.source.call_name(part) in ("sin", "cos"):
                found = self.source.operation(part)
                if found is not None and self.source.value(found.operand) is above:
                    return True
        return False

    def _is_in_exponent(self, node: ast.AST) -> bool:
        for above in self.source.ancestors(node):
            if isinstance(above, ast.stmt):
                return False
            if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Pow):
                return True
            if isinstance(above, ast.Call) and self.source.call_name(above) in ("exp", "pow"):
                return True
        return False


def _is_of_weight(node: ast.expr) -> bool:
    """self.mlp.weight.dtype."""
    owner = node.value if isinstance(node, ast.Attribute) and node.attr == "dtype" else None
    return isinstance(owner, ast.Attribute) and owner.attr == "weight"


def _is_of_integers(node: ast.expr) -> bool:
    return bool(set(last_name(node).lower().split("_")) & set(_INTEGERS))


def _base(node: ast.expr) -> ast.expr:
    """x of x[:, None] and of x.view(-1, 1)."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHAPES - {"to"}:
            node = node.func.value
        else:
            return node


def _words_of(function: ast.AST) -> set[str]:
    return {part.attr for part in ast.walk(function) if isinstance(part, ast.Attribute)}
