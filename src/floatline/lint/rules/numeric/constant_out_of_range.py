"""FL105: a constant that FP16 cannot hold."""

from __future__ import annotations

import ast
import math
import re

from floatline.causes.overflow import SCALAR_OUT_OF_RANGE
from floatline.lint.reading.reaching import Reached, may_be_tensor, reached_numbers
from floatline.lint.reading.silence import follows_dtype, stays_silent
from floatline.lint.reading.source import Operation, Source
from floatline.lint.reading.source_tree import last_name
from floatline.lint.reading.tensors import is_same_name
from floatline.lint.reading.under_autocast import shows_narrow
from floatline.lint.rule import Bad, Holds, Rule

_LARGEST = 65504.0
# Where a call takes its constants: the place behind the operand, and the name.
_PLACES: dict[str, tuple[tuple[int, str], ...]] = {
    "masked_fill": ((1, "value"),),
    "fill": ((0, "value"),),
    "full_like": ((0, "fill_value"),),
    "new_full": ((1, "fill_value"),),
    "full": ((0, "fill_value"),),
    "index_fill": ((2, "value"),),
    "pad": ((2, "value"),),
    "where": ((0, "input"), (1, "other")),
    "clamp": ((0, "min"), (1, "max")),
    "clamp_min": ((0, "min"),),
    "clamp_max": ((0, "max"),),
}


class ConstantOutOfRange(Rule):
    """Flags constants beyond 65504 in `masked_fill`, `full_like`, `fill_`, `where`, `clamp` and masks that are added.

    ## Why is this bad?
    FP16 ends at 65504. `scores.masked_fill(mask, -1e9)` raises "value cannot be converted to type c10::Half without
    overflow"; `torch.where(mask, scores, -1e9)` and `scores + (1 - mask) * -1e9` become -inf without a word, and a row
    that is masked from end to end turns into NaN in the softmax. `clamp(max=1e9)` bounds nothing.

    ## Fix safety
    Unsafe: `torch.finfo(scores.dtype).min` masks as well, but a sum of two such masks is -inf. A constant above 0
    becomes `.max`. Where its sign is not shown, as that of an argument, it is told and stays.
    """

    code = "FL105"
    name = "constant-out-of-range"
    holds = "autocast"
    needs_proof = True
    cause = SCALAR_OUT_OF_RANGE
    message = "this constant is beyond 65504, the largest number of FP16"
    advice = "torch.finfo(x.dtype).min, which every dtype holds"
    fix_safety = "unsafe"
    calls = frozenset(
        (*_PLACES, "masked_fill_", "fill_", "index_fill_", "clamp_", "clamp_min_", "clamp_max_", "clip", "clip_")
    )
    words = ("finfo", *_PLACES, "clip", "e9", "e10", "e5", "e6", "e7", "e8", "e12", "e20", "e30")
    good = (
        "import torch\ny = torch.softmax(x.masked_fill(mask, -1e4), -1)",
        "import torch\ny = x.masked_fill(mask, float('-inf'))",
        "import torch\ny = x.masked_fill(mask, torch.finfo(x.dtype).min)",
        "import torch\ny = x.float().masked_fill(mask, -1e9)",
        "import torch\nids = ids.masked_fill(mask, 151643)",
        "import torch\nscores = torch.full((2, 3), -1e9)",
        "import torch\nbias = torch.where(mask > 0, 0.0, -1e10)",
        "import torch\nx = x + (1.0 - mask) * -10000.0",
        "import torch\nx = x + (1 - mask.long()) * -1e9",
        "import torch\nseconds = elapsed * 1e9",
        "import torch\ny = x.masked_fill(mask, -6e4 if x.dtype == torch.float16 else -1e9)",
    )
    bad = (
        Bad(
            "import torch as t\ny = t.softmax(x.masked_fill(mask, -1e9), -1)",
            fixed="import torch as t\ny = t.softmax(x.masked_fill(mask, t.finfo(x.dtype).min), -1)",
        ),
        Bad(
            "import torch\nscores = torch.where(mask, x, -1e30)\ny = scores.softmax(-1)",
            fixed="import torch\nscores = torch.where(mask, x, torch.finfo(x.dtype).min)\ny = scores.softmax(-1)",
        ),
        "import torch\nbias = torch.full((4, 4), -1e9, dtype=torch.float16)",
        "import torch\nh = q @ k\nbias = torch.full(h.shape, -1e9, dtype=h.dtype)",
        "import torch\nbest = torch.full_like(x, -1e6)",
        "import torch\ns = q @ k.transpose(-1, -2)\nkeep = keep.to(s.dtype)\ns = s + (1.0 - keep) * -1e9",
        "import torch\ndrop = torch.zeros_like(x)\nscores = x - 1e30 * drop",
        "import torch\ns = q @ k.transpose(-1, -2)\ns = s + (keep == 0).to(s.dtype) * -1e9",
        "import torch.nn.functional as F\nrows = F.pad(x, (0, 1), value=-1e8)",
    )

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A constant in a call that fills, chooses or bounds."""
        found = self.source.operation(node)
        if found is None or found.name not in _PLACES:
            return
        for place, name in _PLACES[found.name]:
            given = found.argument(place, name)
            reached = None if given is None else self._beyond(given)
            if given is None or reached is None or not self._may_be_half(found, given):
                continue
            can_fix = (
                found.name in ("masked_fill", "where")
                and _shows_sign(self.source, given)
                and _is_simple(_filled(found, given))
                and not _may_be_mask(self.source, found, given)
            )
            # A mask may be of whole numbers, which hold it.
            holds: Holds | None = (
                "input"
                if _may_be_mask(self.source, found, given) and self.source.dtype(found.operand) != "half"
                else None
            )
            fix = "mask-constant" if can_fix else None
            # `where` raises nothing: it gives an infinity, which does harm where a whole row is one.
            is_seldom = found.name == "where"
            self.report(
                node,
                seen=self._say(found, reached),
                advice="" if reached.number < 0 else "torch.finfo(x.dtype).max, which every dtype holds",
                fix=fix,
                of=_filled(found, given),
                holds=holds,
                is_seldom=is_seldom,
            )
            return

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """A mask times a constant, to be added to scores."""
        if not isinstance(node.op, ast.Mult):
            return
        for constant, mask in ((node.right, node.left), (node.left, node.right)):
            if isinstance(mask, ast.Constant) or not isinstance(
                constant, (ast.Constant, ast.UnaryOp, ast.Name, ast.Attribute)
            ):
                continue
            if isinstance(constant, (ast.Name, ast.Attribute)) and not self._is_flipped(mask):
                continue
            reached = self._beyond(constant)
            if reached is None or not self._is_added_mask(node, mask, reached.number):
                continue
            if stays_silent(self.source, node, mask):
                continue
            # A mask of whole numbers gives an FP32 product, and FP32 scores; one that is given may be anything.
            given: Holds | None = None if follows_dtype(self.source, mask) else "half"
            if given and not isinstance(mask, ast.Name):
                continue
            seen = f"a mask times {reached.number:g}: in FP16 the product is infinite"
            self.report(node, seen=seen, of=_gives_dtype(self.source, mask) or mask, holds=given)
            return

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        """`scores[mask] = -1e9`."""
        target = node.targets[0]
        if not isinstance(target, ast.Subscript) or not isinstance(node.value, (ast.Constant, ast.UnaryOp)):
            return
        reached = self._beyond(node.value)
        if any("bfloat16" in ast.unparse(one) for one in (target.value, self.source.value(target.value))):
            return  # it has the range of FP32
        if reached is None or not self.source.is_tensor(target.value) or stays_silent(self.source, node, target.value):
            return
        seen = f"{reached.number:g} is {self._inf(reached.number)} once it is written to an FP16 tensor"
        # It raises nothing, and an infinity hides or ranks as such a number does: harm is done only to whole rows.
        holds: Holds | None = None if self.source.dtype(target.value) == "half" else "input"
        self.report(node, seen=seen, of=target.value, holds=holds)

    def _beyond(self, node: ast.expr) -> Reached | None:
        if isinstance(node, ast.Constant) and not isinstance(node.value, (int, float)):
            return None
        for one in reached_numbers(self.source, node):
            # A whole number above 0 is an id or a size as often as a score.
            if _LARGEST < abs(one.number) < math.inf and (one.is_float or one.number < 0):
                return one
        return None

    def _may_be_half(self, found: Operation, given: ast.expr) -> bool:
        source = self.source
        if found.name == "full":
            told = found.keywords.get("dtype")
            if told is None or source.path(told).endswith("bfloat16"):
                return False
            if source.dtype(found.node) == "half":
                return True
            if not isinstance(told, ast.Attribute) or told.attr != "dtype" or source.path(told):
                return False
            return not stays_silent(source, found.node, told.value)  # it has the dtype of that tensor
        if found.name == "where":
            sides = [side for side in found.args[:2] if side is not given]
            if len(found.args) != 2 or found.is_method or any(source.number(side) is not None for side in sides):
                return False
            return not stays_silent(source, found.node, *sides)
        if found.name in ("full_like", "new_full") and "dtype" in found.keywords:
            return source.dtype(found.node) == "half"
        return not stays_silent(source, found.node, found.operand)

    def _is_added_mask(self, node: ast.BinOp, mask: ast.expr, number: float) -> bool:
        if self._is_flipped(mask):
            return True
        is_tensor = may_be_tensor(self.source, mask) or _gives_dtype(self.source, mask) is not None
        if not is_tensor and "mask" not in last_name(mask).lower():
            return False
        above = self.source.parents.get(node)
        if not isinstance(above, ast.BinOp) or not isinstance(above.op, (ast.Add, ast.Sub)):
            return False
        return (number < 0 and isinstance(above.op, ast.Add)) or self._is_subtracted(node)

    def _is_subtracted(self, node: ast.BinOp) -> bool:
        above = self.source.parents.get(node)
        return isinstance(above, ast.BinOp) and isinstance(above.op, ast.Sub) and above.right is node

    def _is_flipped(self, node: ast.expr) -> bool:
        """`1 - mask` or `mask - 1`."""
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
            return False
        return [self.source.number(side) for side in (node.left, node.right)] in ([1.0, None], [None, 1.0])

    def _say(self, found: Operation, reached: Reached) -> str:
        if found.name.startswith("clamp"):
            return (
                f"a bound of {reached.number:g} is beyond 65504, where FP16 ends: {found.name} raises on an FP16 tensor"
            )
        if found.name == "where":
            return f"{reached.number:g} is beyond 65504, where FP16 ends: it becomes {self._inf(reached.number)}"
        return f"{reached.number:g} is beyond 65504, where FP16 ends: {found.name} raises on an FP16 tensor"

    @staticmethod
    def _inf(number: float) -> str:
        return "-inf" if number < 0 else "inf"


def _gives_dtype(source: Source, mask: ast.expr) -> ast.expr | None:
    """s of `mask.to(s.dtype)`, `1 - mask.to(s.dtype)` and `mask.type_as(s)`."""
    made = source.value(mask)
    if isinstance(made, ast.BinOp):
        sides = (_gives_dtype(source, side) for side in (made.left, made.right))
        return next((one for one in sides if one is not None), None)
    if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Attribute) or len(made.args) != 1:
        return None
    (given,) = made.args
    if made.func.attr == "type_as":
        return given
    if made.func.attr == "to" and isinstance(given, ast.Attribute) and given.attr == "dtype" and not source.path(given):
        return given.value
    return None


def _shows_sign(source: Source, node: ast.expr) -> bool:
    """Whether one constant is all that stands there: written out, or under a name of this file."""
    made = source.value(node)
    if isinstance(made, ast.UnaryOp):
        return _shows_sign(source, made.operand)
    if isinstance(made, ast.Attribute) and source.is_call_to(source.value(made.value), "torch.finfo"):
        return True
    is_here = not any(isinstance(one, ast.Name) and one.id in source.imported for one in ast.walk(made))
    return is_here and source.number(made) is not None


def _is_simple(node: ast.expr | None) -> bool:
    """Whether it may be written once more: a name, or an attribute of one."""
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_simple(node.value))


def _filled(found: Operation, given: ast.expr) -> ast.expr | None:
    """The tensor whose dtype decides; torch.full has none, and may be told the dtype of another: `dtype=x.dtype`."""
    if found.name == "where":
        return next((side for side in found.args[:2] if side is not given), None)
    told = found.keywords.get("dtype")
    if found.name == "full" and isinstance(told, ast.Attribute) and told.attr == "dtype":
        return told.value
    return found.operand


def _may_be_mask(source: Source, found: Operation, given: ast.expr) -> bool:
    """Whether what is filled may itself be a mask, which may be boolean: no number of its dtype is the smallest.

    It is called one, it masks something in its function, also turned round, or it is made or used as booleans are.
    """
    filled = _filled(found, given)
    if filled is None:
        return False
    spelled = ast.unparse(filled).lower()
    if "mask" in spelled:
        return True
    if shows_narrow(source, filled, surely=True):  # what a product or a layer made is no boolean
        return False
    if not _MASK_WORDS.isdisjoint(re.findall("[a-z]+", spelled)):
        return True
    made = [one for one in (filled, source.value(filled)) if _is_boolean(one)]
    return bool(made) or (isinstance(filled, ast.Name) and _masks(source, filled))


_MASK_WORDS = frozenset("keep kept valid invalid visible pad padding padded causal allowed blocked drop is has".split())  # noqa: SIM905
_BOOLEAN = frozenset("bool logical_not logical_and logical_or eq ne lt gt le ge isnan isinf isfinite isin".split())  # noqa: SIM905


def _is_boolean(node: ast.expr) -> bool:
    """`x > 0`, `~x`, `x & y`, `x.eq(0)`, `x.bool()`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in _BOOLEAN
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor))
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert))


def _masks(source: Source, name: ast.Name) -> bool:
    """Whether a name masks, picks, or is turned round as masks are: `~m`, `1 - m`, `m == 0`, `m.eq(0)`, `x[m]`."""
    for one in ast.walk(source.function(name)):
        made = source.operation(one) if isinstance(one, ast.Call) else None
        if made is not None and made.name in ("masked_fill", "where"):
            masking = made.operand if made.name == "where" and not made.is_method else made.argument(0, "mask")
            if masking is not None and is_same_name(_turned_back(masking), name):
                return True
        if isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.Invert) and is_same_name(one.operand, name):
            return True
        if isinstance(one, ast.Subscript) and is_same_name(_turned_back(one.slice), name):
            return True
    return False


def _turned_back(node: ast.expr) -> ast.expr:
    """m of `~m`, `1 - m`, `m == 0`, `m.eq(0)`, `m.bool()` and `m[:, None]`."""
    while True:
        if isinstance(node, ast.UnaryOp):
            node = node.operand
        elif isinstance(node, ast.Compare):
            node = node.left
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Constant):
            node = node.right
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return node
