"""A loop under FP16 autocast that scales no loss: it gets a GradScaler."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from floatline.fixes.operations import bare
from floatline.fixes.spanning.edits import (
    LOOPS,
    FileEdit,
    FileScene,
    Statement,
    block_of,
    calls_of,
    is_known_at,
    keyword_of,
    names_in,
    owner_of,
    parameters_of,
    statement,
)
from floatline.fixes.spanning.scalers import is_other_format, only_in_fp16
from floatline.fixes.statements import source_of


@dataclass(frozen=True)
class _Loop:
    """What a loop does in a step: a backward pass and the optimizer's step, each by one statement."""

    outer: cst.For | cst.While
    backward: cst.Call
    step: cst.SimpleStatementLine
    optimizer: str


def add_scaler(scene: FileScene) -> FileEdit | None:
    """`scaler = GradScaler(…)` before the loop; it scales the loss, makes the step and moves its scale."""
    loop, made = _read_loop(scene), _write_scaler(scene)
    if loop is None or not made or not is_known_at(scene, made, loop.outer):
        return None
    given = parameters_of(scene.around)
    unscaled = _read_between(scene, loop)
    # A function of one epoch would make a new scaler every time.
    if (
        "scaler" in names_in(scene.module) | given
        or "epoch" in given
        or unscaled is None
        or (unscaled and "(" in loop.optimizer)
        or not isinstance(loop.backward.func, cst.Attribute)
    ):
        return None
    scaled = cst.parse_expression(f"scaler.scale({source_of(bare(loop.backward.func.value))})")
    through = cst.ensure_type(statement(f"scaler.step({loop.optimizer})"), cst.SimpleStatementLine)
    nodes: dict[cst.CSTNode, cst.CSTNode] = {
        loop.backward: loop.backward.with_changes(func=loop.backward.func.with_changes(value=scaled)),
        loop.step: loop.step.with_changes(body=through.body),
    }
    before: dict[cst.CSTNode, list[Statement]] = {loop.outer: [statement(f"scaler = {made}")]}
    if unscaled:
        before[unscaled[0]] = [statement(f"scaler.unscale_({loop.optimizer})")]
    says = "the loss is scaled, so that FP16 holds its gradients; the optimizer gets them unscaled"
    return FileEdit(says, nodes, before, {loop.step: [statement("scaler.update()")]})


def _read_loop(scene: FileScene) -> _Loop | None:
    loops = [node for node in scene.path_to(scene.line) if isinstance(node, LOOPS)]
    calls = calls_of(scene.around, "backward")
    part = scene.line.body[0]
    if not loops or len(calls) != 1 or not isinstance(part, cst.Expr) or part.value is not calls[0]:
        return None
    cleared = {owner_of(call) for call in calls_of(scene.around, "zero_grad")}
    stepped = [owner_of(call) for call in calls_of(scene.around, "step") if owner_of(call) in cleared]
    if len(cleared) != 1 or len(stepped) != 1:
        return None
    text = f"{stepped[0]}.step()"
    lines = [one for one in m.findall(loops[0], m.SimpleStatementLine()) if source_of(one) == text]
    if len(lines) != 1 or not scene.is_before(scene.line, lines[0]):
        return None
    return _Loop(loops[0], calls[0], cst.ensure_type(lines[0], cst.SimpleStatementLine), stepped[0])


def _write_scaler(scene: FileScene) -> str:
    """`torch.amp.GradScaler("cuda", enabled=…)` as autocast has it; '' where autocast is not in FP16, or not here."""
    regions = [call for call in calls_of(scene.around, "autocast") if keyword_of(call, "enabled") != "False"]
    new = scene.context.names.spell("torch.amp.GradScaler")
    if len(regions) != 1 or new is None or any(arg.star for arg in regions[0].args):
        return ""
    region = regions[0]
    old = scene.context.names.resolve(region.func)
    device = '"cuda"' if old.startswith("torch.cuda.") else keyword_of(region, "device_type") or _first(region)
    dtype = keyword_of(region, "dtype")
    if not device or is_other_format(region) or not (dtype or "cuda" in device):  # a GPU's own choice is FP16
        return ""
    enabled = only_in_fp16(scene, keyword_of(region, "enabled"), dtype)
    return f"{source_of(new)}({device}{', enabled=' + enabled if enabled else ''})"


def _first(call: cst.Call) -> str:
    return source_of(call.args[0].value) if call.args and call.args[0].keyword is None else ""


def _read_between(scene: FileScene, loop: _Loop) -> list[cst.CSTNode] | None:
    """Statements that read gradients before the step; None where one may run more often than the step."""
    clips = [
        one for one in m.findall(loop.outer, m.Call()) if "clip_grad" in source_of(cst.ensure_type(one, cst.Call).func)
    ]
    reads = [*m.findall(loop.outer, m.Attribute(attr=m.Name("grad"))), *clips]
    around = block_of(scene.around, loop.step)
    for one in reads:
        path = [node for node in scene.path_to(one) if node in around]
        if not path or not scene.is_before(one, loop.step) or not scene.is_before(scene.line, one):
            return None
    tops = [next(node for node in scene.path_to(one) if node in around) for one in reads]
    return list(dict.fromkeys(tops))
