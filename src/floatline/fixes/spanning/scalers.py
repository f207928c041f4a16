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

_READS_GRADIENTS = re.compile(r"\.grad\b|clip_grad")


def scaler_with_autocast(scene: FileScene) -> FileEdit | None:
    """`GradScaler(enabled=…)` with the `enabled` of autocast: it scales wherever autocast computes in FP16."""
    scaler = next((owner_of(call) for call in calls_of(scene.line, "scale")), "")
    made = _find_scaler_call(scene, scaler)
    regions = [call for call in calls_of(scene.around, "autocast") if keyword_of(call, "enabled") != "False"]
    wanted = {keyword_of(call, "enabled") for call in regions}
    if made is None or not regions or len(wanted) != 1 or any(is_other_format(call) for call in regions):
        return None
    own, theirs = keyword_of(made, "enabled"), wanted.pop()
    dtypes = {keyword_of(call, "dtype") for call in regions}
    line = own_statement(scene.around, made)
    if len(dtypes) > 1:
        return None
    theirs = only_in_fp16(scene, theirs, dtypes.pop())
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


def is_other_format(region: cst.Call) -> bool:
    """Whether autocast's dtype is written out as another one than FP16, or cannot be asked for a second time."""
    dtype = keyword_of(region, "dtype")
    return bool(dtype) and ("bfloat16" in dtype or not is_simple(cst.parse_expression(dtype)))


def only_in_fp16(scene: FileScene, enabled: str, dtype: str) -> str:
    """What turns a scaler on: what turns autocast on, and FP16 where its dtype is decided when the script runs."""
    half = scene.context.names.spell("torch.float16")
    if not dtype or dtype.endswith(("float16", "half")) or half is None:
        return enabled
    asked = f"{dtype} == {source_of(half)}"
    loose = isinstance(cst.parse_expression(enabled), (cst.BooleanOperation, cst.IfExp)) if enabled else False
    return f"({enabled}) and {asked}" if loose else f"{enabled} and {asked}" if enabled else asked


def _is_word(arg: cst.Arg, word: str) -> bool:
    return arg.keyword is not None and arg.keyword.value == word


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
    if not steps or any(one in block or _runs_with(scene, one) for one in steps) or not _can_move(scene, moved):
        return None
    kept = [cst.ensure_type(one, cst.SimpleStatementLine) for one in moved if not calls_of(one, "update")]
    nodes: dict[cst.CSTNode, cst.CSTNode | list[Statement]] = {one: [] for one in moved}
    before: dict[cst.CSTNode, list[Statement]] = {}
    holder = _only_holder(scene, moved)
    if holder is not None:
        nodes = {holder: []}
    for step in steps:
        has_update = scaler in _owners_beside(scene, step, "update", moved)
        through = cst.ensure_type(statement(f"{scaler}.step({optimizer})"), cst.SimpleStatementLine)
        lines: list[Statement] = [one.deep_clone() for one in kept]
        reader = _find_reader(scene, step)
        if reader is not None:  # what clips already stands before the step
            before[reader] = [one.with_changes(leading_lines=()) for one in lines]
            lines = []
        lines.append(step.with_changes(body=through.body, leading_lines=()))
        lines[0] = lines[0].with_changes(leading_lines=step.leading_lines)
        nodes[step] = [*lines, *(() if has_update else (statement(f"{scaler}.update()"),))]
    says = "gradients are unscaled once, when all micro-batches have added theirs"
    return FileEdit(says, nodes, before, safe=False)


def _runs_with(scene: FileScene, step: cst.CSTNode) -> bool:
    """Whether a step is made in every turn of the loop that the statement stands in: it is unscaled once already."""
    loops = [node for node in scene.path_to(scene.line) if isinstance(node, LOOPS)]
    path = scene.path_to(step)
    if not loops or loops[-1] not in path:
        return False
    return not any(isinstance(one, (cst.If, *LOOPS)) for one in path[path.index(loops[-1]) + 1 :])


def _find_reader(scene: FileScene, step: cst.CSTNode) -> cst.CSTNode | None:
    """The first statement behind the micro-batches, in the block of a step, that reads or clips gradients."""
    block = block_of(scene.around, step)
    behind = [one for one in block if scene.is_before(scene.line, one) and scene.is_before(one, step)]
    behind = [one for one in behind if scene.line not in find_path(one, scene.line)]
    return next((one for one in behind if _READS_GRADIENTS.search(cst.Module([]).code_for_node(one))), None)


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
    return not any(re.search(r"\.grad\b", source_of(one)) for one in lines)


def _only_holder(scene: FileScene, moved: list[cst.CSTNode]) -> cst.If | None:
    """The `if` that holds nothing else than what is moved, and asks by names alone."""
    path = find_path(scene.around, scene.line)
    holder = path[-3] if len(path) > 2 else None
    if not isinstance(holder, cst.If) or holder.orelse is not None or len(holder.body.body) != len(moved):
        return None
    parent = path[-4] if len(path) > 3 else None
    is_elif = isinstance(parent, cst.If)
    return None if is_elif or m.findall(holder.test, m.Call()) else holder


def one_scaler(scene: FileScene) -> FileEdit | None:
    """A scaler that is made again and again is made once: before the loops around it, or before its function."""
    part = scene.line.body[0]
    if len(scene.line.body) != 1 or not isinstance(part, cst.Assign) or len(part.targets) != 1:
        return None
    target, made = part.targets[0].target, part.value
    if not isinstance(target, cst.Name) or not isinstance(made, cst.Call) or not m.matches(made.func, _NAMED_SCALER):
        return None
    loops = [node for node in scene.path_to(scene.line) if isinstance(node, LOOPS)]
    first = loops[0] if loops else scene.around
    used = names_in(made)
    others = [one for one in m.findall(scene.around, m.SimpleStatementLine()) if target.value in assigned_in(one)]
    if isinstance(first, cst.Module) or len(block_of(scene.around, scene.line)) < 2 or others != [scene.line]:
        return None
    if not loops and (first not in scene.module.body or not _is_known_above(scene, used, first)):
        return None
    if loops and used & assigned_in(loops[0]):
        return None
    says = "one scaler for the whole training: a new one searches its scale again"
    same = [one for one in scene.module.body if isinstance(one, cst.SimpleStatementLine)]
    if not loops and any(target.value in assigned_in(one) for one in same):
        is_alike = any(source_of(one) == source_of(scene.line) for one in same)
        return FileEdit(says, {scene.line: []}, safe=False) if is_alike else None
    moved = scene.line.with_changes(leading_lines=())
    return FileEdit(says, {scene.line: []}, {first: [moved]}, safe=False)


def _is_known_above(scene: FileScene, names: set[str], function: cst.CSTNode) -> bool:
    """Whether names of a function are those of the file, and made before it."""
    if names & (assigned_in(scene.around) | parameters_of(scene.around)):
        return False
    lines = [one for one in scene.module.body if isinstance(one, cst.SimpleStatementLine)]
    made = {name for one in lines if scene.is_before(one, function) for name in assigned_in(one)}
    later = {name for one in lines if not scene.is_before(one, function) for name in assigned_in(one)}
    return not names & later and names <= made | scene.context.names.aliases.keys()
