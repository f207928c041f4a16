"""Loss scales of one's own: one that never falls is lowered, and gradients that still carry one are divided by it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from floatline.fixes.operations import enclosed, is_simple, read_number
from floatline.fixes.scope import find_path
from floatline.fixes.spanning.edits import (
    LOOPS,
    FileEdit,
    FileScene,
    Statement,
    assigned_in,
    block_of,
    calls_of,
    own_statement,
    owner_of,
    parameters_of,
    statement,
)
from floatline.fixes.statements import source_of

_FINITE = m.OneOf(*(m.Name(name) for name in ("isfinite", "isinf", "isnan")))
_ENDS = m.SimpleStatementLine([m.Continue() | m.Return()])
_GRAD = m.Attribute(attr=m.Name("grad"))
# Methods that hand a gradient on as it is.
_VIEWS = ("float", "double", "to", "detach", "clone", "data")


@dataclass(frozen=True)
class _OwnScale:
    """What a loss is multiplied by.

    Args:
        kept: The name or attribute that lasts from step to step: the scale, or its power of two.
        text: The scale as it is written where it is computed.
        lowered: The statement that halves it.
    """

    kept: str
    text: str
    lowered: str


def scale_back_off(scene: FileScene) -> FileEdit | None:
    """A scale of one's own is halved where gradients that are not finite leave a step out."""
    scale = _read_scale(scene)
    if scale is None or not _divides_gradients(scene, scale) or not _may_assign(scene, scale.kept):
        return None
    loops = [node for node in scene.path_to(scene.line) if isinstance(node, LOOPS)]
    if not loops and "." not in scale.kept:  # a local would begin again with every call
        return None
    inside = loops[0] if loops else scene.around
    if scale.kept in assigned_in(inside):
        return None
    half = statement(scale.lowered)
    says = "a scale that is too large is halved, as a GradScaler does it; gradients are divided by it anyway"
    where = _reach(scene, scale.kept) if inside is scene.around else inside
    checks = [cst.ensure_type(one, cst.If) for one in m.findall(where, m.If())]
    checks = [one for one in checks if _asks_for_finite(where, one)]
    if len(checks) != 1 or _falls_in(checks[0], scale):
        return None
    return _halve_where_skipped(checks[0], half, says)


def _reach(scene: FileScene, name: str) -> cst.CSTNode:
    """Where a name means the same: an attribute of self in the whole class, anything else in this function."""
    return (scene.find_class() if name.startswith("self.") else None) or scene.around


def _asks_for_finite(where: cst.CSTNode, check: cst.If) -> bool:
    """`if not torch.isfinite(…)`, also by the name of what such a call gave."""
    if m.findall(check.test, _FINITE):
        return True
    asked = {cst.ensure_type(one, cst.Name).value for one in m.findall(check.test, m.Name())}
    made = [one for one in m.findall(where, m.Assign()) if assigned_in(one) & asked]
    return any(m.findall(cst.ensure_type(one, cst.Assign).value, _FINITE) for one in made)


def _falls_in(check: cst.If, scale: _OwnScale) -> bool:
    return scale.kept in assigned_in(check)


def _halve_where_skipped(check: cst.If, half: Statement, says: str) -> FileEdit | None:
    """Put a statement into the branch that makes no step."""
    last = check.body.body[-1] if isinstance(check.body, cst.IndentedBlock) and check.body.body else None
    if last is not None and m.matches(last, _ENDS) and not calls_of(check.body, "step"):
        return FileEdit(says, before={last: [half]})
    if not calls_of(check.body, "step"):
        return None
    if check.orelse is None:
        block = cst.Else(cst.IndentedBlock([cst.ensure_type(half, cst.SimpleStatementLine)]))
        return FileEdit(says, {check: check.with_changes(orelse=block)})
    if not isinstance(check.orelse, cst.Else) or calls_of(check.orelse, "step"):
        return None
    first = check.orelse.body.body[0]
    return FileEdit(says, before={first: [half]}) if isinstance(check.orelse.body, cst.IndentedBlock) else None


def _read_scale(scene: FileScene) -> _OwnScale | None:
    """The scale of `(loss * scale).backward()` in the statement, also where the product has a name."""
    for call in calls_of(scene.line, "backward"):
        if call.args or not isinstance(call.func, cst.Attribute):
            continue
        side = _scale_of(scene.context.follow(call.func.value))
        if side is None:
            return None
        text, made = source_of(side), scene.context.follow(side)
        power = _power_of(made)
        if power:
            return _OwnScale(power, source_of(made), f"{power} = {power} - 1")
        return _OwnScale(text, text, f"{text} = {text} / 2")
    return None


def _power_of(node: cst.BaseExpression) -> str:
    """`power` of `2 ** power`; '' of anything else."""
    if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Power):
        return ""
    return source_of(node.right) if read_number(node.left) == 2.0 and is_simple(node.right) else ""


def _scale_of(product: cst.BaseExpression) -> cst.BaseExpression | None:
    """The side of a product whose name says that it is a scale."""
    if not isinstance(product, cst.BinaryOperation) or not isinstance(product.operator, cst.Multiply):
        return None
    sides = [one for one in (product.left, product.right) if is_simple(one)]
    return next((one for one in sides if "scale" in source_of(one).rpartition(".")[2].lower()), None)


def _divides_gradients(scene: FileScene, scale: _OwnScale) -> bool:
    """Whether gradients are divided by the scale: `p.grad.div_(scale)`, `p.grad /= scale`, `1 / 2 ** power`."""
    texts = [source_of(one) for one in m.findall(_reach(scene, scale.kept), m.SimpleStatementLine())]
    return any(".grad" in text and _is_divided(text, scale.text) for text in texts)


def _is_divided(text: str, scale: str) -> bool:
    bare = re.escape(scale.replace(" ", ""))
    return re.search(rf"(/=?|div_?\()\(?{bare}(?![\w.])", text.replace(" ", "")) is not None


def _may_assign(scene: FileScene, name: str) -> bool:
    """Whether an assignment here changes what the function reads, and no global of that name."""
    if "." in name or isinstance(scene.around, cst.Module):
        return True
    return name in parameters_of(scene.around) or name in assigned_in(scene.around)


def divide_by_scale(scene: FileScene) -> FileEdit | None:
    """Gradients that still carry the scale of `(loss * scale).backward()` are divided by it where they are read."""
    scale = _find_scale(scene)
    if not scale:
        return None
    says = f"gradients are divided by {scale}, which the loss was multiplied by"
    lines = [one for one in m.findall(scene.around, m.SimpleStatementLine()) if _reads(one)]
    lines = [one for one in lines if not _is_divided(source_of(one), scale)]
    if scene.line in lines:
        lines = [scene.line]
    if len(lines) == 1:
        return FileEdit(says, {node: _divided(lines[0], node, scale) for node in _reads(lines[0])}, safe=False)
    return None if lines else _divide_all(scene, scale, says)


def _find_scale(scene: FileScene) -> str:
    """The one scale of the file that this function can read; '' where there is none."""
    found: dict[str, cst.Call] = {}
    for call in calls_of(scene.module, "backward"):
        if call.args or not isinstance(call.func, cst.Attribute):
            continue
        value = call.func.value
        for one in m.findall(scene.module, m.Assign()):
            if isinstance(value, cst.Name) and assigned_in(one) == {value.value}:
                value = cst.ensure_type(one, cst.Assign).value
        side = _scale_of(value)
        if side is not None:
            found[source_of(side)] = call
    if len(found) != 1:
        return ""
    (text, call), home = next(iter(found.items())), scene.find_class()
    if "." in text:
        return text if text.startswith("self.") and home is not None and find_path(home, call) else ""
    own = assigned_in(scene.around) | parameters_of(scene.around)
    top = {name for one in scene.module.body if isinstance(one, cst.SimpleStatementLine) for name in assigned_in(one)}
    return text if text in own | top else ""


def _reads(line: cst.CSTNode) -> list[cst.BaseExpression]:
    """The gradients that a statement reads as numbers, with what hands them on: `p.grad.float()`."""
    tests = [*m.findall(line, m.Comparison()), *m.findall(line, m.AssignTarget()), *m.findall(line, m.Del())]
    hidden = [node for one in tests for node in m.findall(one, _GRAD)]
    found: list[cst.BaseExpression] = []
    for node in m.findall(line, _GRAD):
        if node in hidden:
            continue
        path = find_path(line, node)
        at = len(path) - 1
        while at > 0 and _hands_on(path[at - 1], path[at]):
            at -= 1
        whole = path[at]
        above = path[at - 1] if at else None
        if isinstance(above, cst.Attribute) and above.attr.value.endswith("_"):  # p.grad.zero_() writes
            continue
        found.append(whole)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    return found


def _hands_on(above: cst.CSTNode, below: cst.CSTNode) -> bool:
    """Whether a node is `below.float`, or the call of that."""
    if isinstance(above, cst.Attribute):
        return above.value is below and above.attr.value in _VIEWS
    is_method = isinstance(below, cst.Attribute) and below.attr.value in _VIEWS
    return isinstance(above, cst.Call) and above.func is below and is_method


def _divided(line: cst.CSTNode, node: cst.BaseExpression, scale: str) -> cst.BaseExpression:
    quotient = cst.BinaryOperation(node, cst.Divide(), cst.parse_expression(scale))
    above = find_path(line, node)[-2]
    return quotient if isinstance(above, (cst.Arg, cst.Assign)) else enclosed(quotient)


def _divide_all(scene: FileScene, scale: str, says: str) -> FileEdit | None:
    """A loop over the optimizer's parameters before its step, and before what clips."""
    steps = [call for call in calls_of(scene.around, "step") if not call.args]
    cleared = {owner_of(call) for call in calls_of(scene.module, "zero_grad")}
    steps = [call for call in steps if owner_of(call) in cleared] if len(steps) > 1 else steps
    line = own_statement(scene.around, steps[0]) if len(steps) == 1 else None
    if line is None or source_of(line) != source_of(steps[0]):
        return None
    taken = assigned_in(scene.around) & {"group", "p"}
    if taken:
        return None
    block = block_of(scene.around, line)
    clips = [one for one in block if m.findall(one, m.Name("clip_grad_norm_") | m.Name("clip_grad_value_"))]
    first = clips[0] if clips and scene.is_before(clips[0], line) else line
    text = (
        f"for group in {owner_of(steps[0])}.param_groups:\n"
        '    for p in group["params"]:\n'
        f"        if p.grad is not None:\n            p.grad.div_({scale})\n"
    )
    return FileEdit(says, before={first: [statement(text)]}, safe=False)
