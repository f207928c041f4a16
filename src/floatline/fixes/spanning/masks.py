"""Masks that are added: their constant fits the dtype, and their sum ends at its smallest number instead of at -inf."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from floatline.fixes.borders import find_owner
from floatline.fixes.operations import float_of, read_number, read_operation
from floatline.fixes.spanning.edits import FileEdit, FileScene, assigned_in, parameters_of, statement
from floatline.fixes.statements import source_of

_WORDS = ("mask", "pad", "causal", "bias")
_LARGEST = 65504.0
_SAYS = "masks are added in FP32, and the sum ends at the smallest number of the dtype"


def small_mask(scene: FileScene) -> FileEdit | None:
    """`pad * -1e9` as `pad * (torch.finfo(pad.dtype).min / 2)`: a score is added to it, and two masks may be.

    1e9 becomes half of the largest number: the constant keeps its sign.
    """
    finfo, found = scene.context.names.spell("torch.finfo"), dict[cst.CSTNode, cst.CSTNode]()
    words = set[str]()
    for one in m.findall(scene.line, m.BinaryOperation(operator=m.Multiply())):
        node = cst.ensure_type(one, cst.BinaryOperation)
        for mask, constant, side in ((node.left, node.right, "right"), (node.right, node.left, "left")):
            number, dtype = read_number(constant), _dtype_of(mask, scene)
            if finfo is None or number is None or abs(number) <= _LARGEST or not dtype or "(" in dtype:
                continue
            which, word = ("min", "smallest") if number < 0 else ("max", "largest")
            words.add(word)
            least = f"({source_of(finfo)}({dtype}).{which} / 2)"
            found[node] = node.with_changes(**{side: cst.parse_expression(least)})
    says = f"the mask's constant is half of the {' and the '.join(sorted(words))} number of its dtype"
    return FileEdit(says, found) if len(found) == 1 else None


def _dtype_of(node: cst.BaseExpression, scene: FileScene) -> str:
    """The dtype of a mask, as source: `x.dtype` of `pad.to(x.dtype)` and of `1 - x`; '' where nobody can tell."""
    found = read_operation(node, scene.context.names)
    if found is not None and found.is_method and found.name == "to" and len(found.rest) == 1:
        return source_of(found.rest[0].value)
    if found is not None and found.is_method and found.name == "type_as":
        return f"{source_of(found.rest[0].value)}.dtype"
    owner = find_owner(node)
    return f"{source_of(owner)}.dtype" if owner is not None else ""


def mask_sum(scene: FileScene) -> FileEdit | None:
    """`s + (causal + padding)` in FP32, no smaller than the smallest number of its dtype, and back in that dtype."""
    if scene.context.op != "add" or len(scene.line.body) != 1:
        return None
    part = scene.line.body[0]
    if isinstance(part, cst.AugAssign):
        return _add_in_place(scene, part)
    sums = [one for one in _outermost_sums(scene.line) if any(_is_mask(leaf, scene) for leaf in _leaves(one))]
    if len(sums) != 1:
        return None
    new = _bounded(sums[0], scene)
    return None if new is None else FileEdit(_SAYS, {sums[0]: new}, safe=False)


def _add_in_place(scene: FileScene, part: cst.AugAssign) -> FileEdit | None:
    """`s += mask` as `s = …`, where s is this function's own."""
    target = part.target
    if not isinstance(part.operator, cst.AddAssign) or not isinstance(target, cst.Name):
        return None
    if target.value in parameters_of(scene.around) or not _is_computed_here(scene, target.value):
        return None
    if not any(_is_mask(leaf, scene) for leaf in _leaves(part.value)):
        return None
    new = _bounded(cst.BinaryOperation(target, cst.Add(), _closed(part.value)), scene)
    if new is None:
        return None
    text = cst.ensure_type(statement(f"{target.value} = {source_of(new)}"), cst.SimpleStatementLine)
    return FileEdit(_SAYS, {scene.line: scene.line.with_changes(body=text.body)}, safe=False)


def _is_computed_here(scene: FileScene, name: str) -> bool:
    """Whether every assignment computes a new tensor: no view of another one is written to."""
    made = [cst.ensure_type(one, cst.Assign) for one in m.findall(scene.around, m.Assign()) if name in assigned_in(one)]
    return bool(made) and all(isinstance(one.value, cst.BinaryOperation) for one in made)


def _closed(node: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(node, cst.BinaryOperation) and not node.lpar:
        return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return node


def _outermost_sums(line: cst.CSTNode) -> list[cst.BinaryOperation]:
    finder = _Sums()
    line.visit(finder)
    return finder.found


class _Sums(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.BinaryOperation] = []

    def visit_BinaryOperation(self, node: cst.BinaryOperation) -> bool:  # noqa: N802
        if not isinstance(node.operator, cst.Add):
            return True
        self.found.append(node)
        for leaf in _leaves(node):
            leaf.visit(self)
        return False


def _leaves(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
        return [*_leaves(node.left), *_leaves(node.right)]
    return [node]


def _is_mask(node: cst.BaseExpression, scene: FileScene) -> bool:
    """Whether a name says that it is a mask, or was made by filling one."""
    made = scene.context.follow(node)
    if made is not node and any(way in source_of(made) for way in ("masked_fill(", ".finfo(", "-inf")):
        return True
    owner = find_owner(node)
    last = owner.attr.value if isinstance(owner, cst.Attribute) else owner.value if isinstance(owner, cst.Name) else ""
    return any(word in last.lower() for word in _WORDS)


def _widen(node: cst.BaseExpression, scene: FileScene) -> cst.BaseExpression:
    """A sum in FP32: every sum inside it, and of two other sides one, the mask or a name rather than a product."""
    if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Add):
        return float_of(node, scene.context.names)
    sums = [len(_leaves(side)) > 1 for side in (node.left, node.right)]
    if not any(sums):
        ranks = [(_is_mask(side, scene), find_owner(side) is not None) for side in (node.left, node.right)]
        sums = [ranks[0] > ranks[1], ranks[0] <= ranks[1]]
    left, right = (
        _widen(side, scene) if wanted else side for side, wanted in zip((node.left, node.right), sums, strict=True)
    )
    return node.with_changes(left=left, right=right)


def _bounded(node: cst.BinaryOperation, scene: FileScene) -> cst.BaseExpression | None:
    """`(…).clamp(min=torch.finfo(s.dtype).min).to(s.dtype)`."""
    finfo = scene.context.names.spell("torch.finfo")
    leaves = _leaves(node)
    owner = next((found for leaf in leaves if (found := find_owner(leaf)) is not None), None)
    wide = _widen(node.with_changes(lpar=(), rpar=()), scene)
    if finfo is None or owner is None or any(read_number(leaf) is not None for leaf in leaves):
        return None
    dtype = f"{source_of(owner)}.dtype"
    text = f"({source_of(wide)}).clamp(min={source_of(finfo)}({dtype}).min).to({dtype})"
    return cst.parse_expression(text)
