"""Loss scales: a scaler that is off, a scale of one's own that never falls, unscaling once for each micro-batch."""

from __future__ import annotations

import re

import libcst as cst
import libcst.matchers as m

from floatline.fixes.operations import is_simple
from floatline.fixes.scope import find_path
from floatline.fixes.spanning.edits import (
    LOOPS,
    FileEdit,
    FileScene,
    Statement,
    assigned_in,
    block_of,
    calls_of,
    is_known_at,
    keyword_of,
    names_in,
    own_statement,
    owner_of,
    parameters_of,
    statement,
)
from floatline.fixes.statements import source_of

_FINITE = m.OneOf(*(m.Name(name) for name in ("isfinite", "isinf", "isnan")))


def scaler_with_autocast(scene: FileScene) -> FileEdit | None:
    """`GradScaler(enabled=…)` with the `enabled` of autocast: it scales wherever autocast computes in FP16."""
    scaler = next((owner_of(call) for call in calls_of(scene.line, "scale")), "")
    made = _find_scaler_call(scene, scaler)
    regions = [call for call in calls_of(scene.around, "autocast") if keyword_of(call, "enabled") != "False"]
    wanted = {keyword_of(call, "enabled") for call in regions}
    if made is None or not regions or len(wanted) != 1 or not all(_may_be_fp16(call) for call in regions):
        return None
    own, theirs = keyword_of(made, "enabled"), wanted.pop()
    line = own_statement(scene.around, made)
    if own in ("", theirs) or line is None or not is_known_at(scene, theirs, line):
        return None
    args = [arg for arg in made.args if not _is_word(arg, "enabled")]
    if theirs:
        kept = next(arg for arg in made.args if _is_word(arg, "enabled"))
        args.append(kept.with_changes(value=cst.parse_expression(theirs)))
    args = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in args]
    return FileEdit("the scaler is on wherever autocast is", {made: made.with_changes(args=args)})


def _find_scaler_call(scene: FileScene, scaler: str) -> cst.Call | None:
    """`GradScaler(…)` of the one statement of this function that makes a scaler of this name."""
    lines = [one for one in m.findall(scene.around, m.Assign()) if scaler and scaler in assigned_in(one)]
    if len(lines) != 1:
        return None
    value = cst.ensure_type(lines[0], cst.Assign).value
    return value if isinstance(value, cst.Call) and m.matches(value.func, _NAMED_SCALER) else None


_NAMED_SCALER = m.Attribute(attr=m.Name("GradScaler")) | m.Name("GradScaler")


def _may_be_fp16(region: cst.Call) -> bool:
    """Whether autocast's dtype is written out as FP16, or is the device's own."""
    dtype = keyword_of(region, "dtype")
    return not dtype or (dtype.endswith(("float16", "half")) and "bfloat16" not in dtype)


def _is_word(arg: cst.Arg, word: str) -> bool:
    return arg.keyword is not None and arg.keyword.value == word


def scale_back_off(scene: FileScene) -> FileEdit | None:
    """A scale of one's own is halved where gradients that are not finite leave a step out."""
    scale = _find_own_scale(scene)
    if not scale or not _divides_gradients(scene, scale) or not _may_assign(scene, scale):
        return None
    loops = [node for node in scene.path_to(scene.line) if isinstance(node, LOOPS)]
    if not loops and "." not in scale:  # a local would begin again with every call
        return None
    inside = loops[0] if loops else scene.around
    if scale in assigned_in(inside):
        return None
    half = statement(f"{scale} = {scale} / 2")
    says = "a scale that is too large is halved, as a GradScaler does it; gradients are divided by it anyway"
    checks = [one for one in m.findall(inside, m.If()) if m.findall(cst.ensure_type(one, cst.If).test, _FINITE)]
    if len(checks) != 1:
        return None
    return _halve_where_skipped(cst.ensure_type(checks[0], cst.If), half, says)


def _halve_where_skipped(check: cst.If, half: Statement, says: str) -> FileEdit | None:
    """Put a statement into the branch that makes no step."""
    last = check.body.body[-1] if isinstance(check.body, cst.IndentedBlock) and check.body.body else None
    if last is not None and m.matches(last, m.SimpleStatementLine([m.Continue()])) and not calls_of(check.body, "step"):
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


def _find_own_scale(scene: FileScene) -> str:
    """`scale` of `(loss * scale).backward()`, also where the product has a name; '' where there is none."""
    for call in calls_of(scene.line, "backward"):
        if call.args or not isinstance(call.func, cst.Attribute):
            continue
        product = scene.context.follow(call.func.value)
        if isinstance(product, cst.BinaryOperation) and isinstance(product.operator, cst.Multiply):
            sides = [source_of(one) for one in (product.left, product.right) if is_simple(one)]
            return next((one for one in sides if "scale" in one.rpartition(".")[2].lower()), "")
    return ""


def _divides_gradients(scene: FileScene, scale: str) -> bool:
    """Whether the function divides gradients by the scale: `p.grad.div_(scale)`, `p.grad /= scale`."""
    divided = re.compile(rf"(/=? ?|div_?\(){re.escape(scale)}(?![\w.])")
    texts = [source_of(one) for one in m.findall(scene.around, m.SimpleStatementLine())]
    return any(".grad" in text and divided.search(text) for text in texts)


def _may_assign(scene: FileScene, name: str) -> bool:
    """Whether an assignment here changes what the function reads, and no global of that name."""
    if "." in name or isinstance(scene.around, cst.Module):
        return True
    return name in parameters_of(scene.around) or name in assigned_in(scene.around)


def unscale_once(scene: FileScene) -> FileEdit | None:
    """`unscale_`, clipping and `update` of every micro-batch move to where the optimizer makes its step."""
    call = next(iter(calls_of(scene.line, "unscale_")), None)
    if call is None or len(call.args) != 1 or len(scene.line.body) != 1:
        return None
    scaler, optimizer = owner_of(call), source_of(call.args[0].value)
    block = block_of(scene.around, scene.line)
    moved = [one for one in block if one is scene.line or _belongs_to_step(one, scaler)]
    steps = [
        one
        for one in _find_steps(scene, scaler, optimizer)
        if scaler not in _owners_beside(scene, one, "unscale_", moved)
    ]
    if not steps or any(one in block for one in steps) or not _can_move(scene, moved):
        return None
    kept = [cst.ensure_type(one, cst.SimpleStatementLine) for one in moved if not calls_of(one, "update")]
    nodes: dict[cst.CSTNode, cst.CSTNode | list[Statement]] = {one: [] for one in moved}
    holder = _only_holder(scene, moved)
    if holder is not None:
        nodes = {holder: []}
    for step in steps:
        has_update = scaler in _owners_beside(scene, step, "update", moved)
        through = cst.ensure_type(statement(f"{scaler}.step({optimizer})"), cst.SimpleStatementLine)
        lines: list[Statement] = [one.deep_clone() for one in kept]
        lines[0] = lines[0].with_changes(leading_lines=step.leading_lines)
        lines.append(step.with_changes(body=through.body, leading_lines=()))
        nodes[step] = [*lines, *(() if has_update else (statement(f"{scaler}.update()"),))]
    return FileEdit("gradients are unscaled once, when all micro-batches have added theirs", nodes, safe=False)


def _belongs_to_step(line: cst.CSTNode, scaler: str) -> bool:
    """Clipping, and the scaler's update."""
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1 or not isinstance(line.body[0], cst.Expr):
        return False
    updates = [one for one in calls_of(line, "update") if owner_of(one) == scaler]
    return bool(updates) or "clip_grad" in source_of(line)


def _find_steps(scene: FileScene, scaler: str, optimizer: str) -> list[cst.SimpleStatementLine]:
    """`optimizer.step()` and `scaler.step(optimizer)` behind the statement."""
    lines = [cst.ensure_type(one, cst.SimpleStatementLine) for one in m.findall(scene.around, m.SimpleStatementLine())]
    wanted = (f"{optimizer}.step()", f"{scaler}.step({optimizer})")
    return [one for one in lines if source_of(one) in wanted and scene.is_before(scene.line, one)]


def _owners_beside(scene: FileScene, step: cst.CSTNode, name: str, moved: list[cst.CSTNode]) -> set[str]:
    """Whose method of this name the block of a step calls, without what is moved."""
    own = [call for one in moved for call in calls_of(one, name)]
    return {owner_of(call) for one in block_of(scene.around, step) for call in calls_of(one, name) if call not in own}


def _can_move(scene: FileScene, moved: list[cst.CSTNode]) -> bool:
    """Whether what is moved uses nothing of the micro-batch, and nothing that is left reads gradients."""
    loops = [node for node in scene.path_to(scene.line) if isinstance(node, LOOPS)]
    if not loops:
        return False
    inner = loops[-1]
    lines = [one for one in m.findall(inner, m.SimpleStatementLine()) if one not in moved]
    made = {name for one in lines for name in assigned_in(one)}
    made |= names_in(inner.target) if isinstance(inner, cst.For) else set[str]()
    if any(names_in(one) & made for one in moved):
        return False
    return not any(".grad" in source_of(one) for one in lines)


def _only_holder(scene: FileScene, moved: list[cst.CSTNode]) -> cst.If | None:
    """The `if` that holds nothing else than what is moved, and asks by names alone."""
    path = find_path(scene.around, scene.line)
    holder = path[-3] if len(path) > 2 else None
    if not isinstance(holder, cst.If) or holder.orelse is not None or len(holder.body.body) != len(moved):
        return None
    parent = path[-4] if len(path) > 3 else None
    is_elif = isinstance(parent, cst.If)
    return None if is_elif or m.findall(holder.test, m.Call()) else holder
