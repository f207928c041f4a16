"""Backward passes beside a scaler: losses that are not scaled, gradients unscaled by hand, and ones never cleared."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from floatline.fixes.operations import bare
from floatline.fixes.scope import find_path
from floatline.fixes.spanning.edits import FileEdit, FileScene, Statement, block_of, calls_of, owner_of, statement
from floatline.fixes.statements import find_scaler, source_of

_ASKS_SCALE = m.Attribute(attr=m.Name("get_scale"))


def scale_backward(scene: FileScene) -> FileEdit | None:
    """`loss.backward()` as `scaler.scale(loss).backward()`, beside a pass that is scaled."""
    scaler = find_scaler(scene.around)
    calls = [call for call in calls_of(scene.line, "backward") if isinstance(call.func, cst.Attribute)]
    if not scaler or len(calls) != 1 or calls_of(calls[0].func, "scale"):
        return None
    function = cst.ensure_type(calls[0].func, cst.Attribute)
    scaled = cst.parse_expression(f"{scaler}.scale({source_of(bare(function.value))})")
    new = calls[0].with_changes(func=function.with_changes(value=scaled))
    return FileEdit("every loss of a step is scaled: the scaler divides all gradients", {calls[0]: new}, safe=False)


def unscale_by_scaler(scene: FileScene) -> FileEdit | None:
    """`p.grad.div_(scaler.get_scale())` is taken out; what reads gradients behind it divides for itself."""
    line = scene.line
    divided = m.Call(m.Attribute(attr=m.Name("div_")), args=[m.Arg(m.Call(_ASKS_SCALE, args=[]))])
    part = line.body[0]
    if len(line.body) != 1 or not isinstance(part, cst.Expr) or not m.matches(part.value, divided):
        return None
    call = cst.ensure_type(part.value, cst.Call)
    gradient = owner_of(call).removesuffix(".data")
    scale = source_of(call.args[0].value)
    if not gradient.endswith(".grad") or not calls_of(scene.module, "unscale_") + calls_of(scene.module, "step"):
        return None
    block = block_of(scene.around, line)
    if len(block) < 2:
        return None
    nodes: dict[cst.CSTNode, cst.CSTNode | list[Statement]] = {line: []}
    quotient = cst.parse_expression(f"({gradient} / {scale})")
    for one in block[block.index(line) + 1 :]:
        for node in m.findall(one, m.Attribute(attr=m.Name("grad"))):
            if source_of(node) == gradient:
                nodes[node] = quotient
    return FileEdit("the scaler unscales gradients once; here they are only read", nodes, safe=False)


def clear_always(scene: FileScene) -> FileEdit | None:
    """`optimizer.zero_grad()` that runs only after good steps stands before the question, and runs always."""
    path = find_path(scene.around, scene.line)
    holders = [one for one in path if isinstance(one, cst.If)]
    calls = calls_of(scene.line, "zero_grad")
    if not holders or not calls or source_of(scene.line) != source_of(calls[0]):
        return None
    holder = holders[-1]
    if not find_scaler(scene.around) or block_of(scene.around, scene.line) is not holder.body.body:
        return None
    if not m.findall(holder.test, _ASKS_SCALE) and "scale" not in source_of(holder.test).lower():
        return None
    rest = len(holder.body.body) > 1
    nodes: dict[cst.CSTNode, cst.CSTNode | list[Statement]] = {scene.line: [] if rest else statement("pass")}
    clear = scene.line.with_changes(leading_lines=())
    says = "gradients of a step that was left out are cleared as well"
    return FileEdit(says, nodes, {holder: [clear]}, safe=False)


def unscale_all(scene: FileScene) -> FileEdit | None:
    """Before clipping, `unscale_` for every optimizer that the scaler steps, and not for one of them alone."""
    scaler = find_scaler(scene.around)
    if not scaler or "clip_grad" not in source_of(scene.line):
        return None
    stepped = [call for call in calls_of(scene.around, "step") if owner_of(call) == scaler and call.args]
    known = {source_of(call.args[0].value) for call in calls_of(scene.around, "unscale_") if owner_of(call) == scaler}
    missing: list[str] = []
    for call in stepped:
        missing += [name for name in _optimizers(scene, call) if name not in (*known, *missing)]
    if not known or not missing or any(" " in name or "(" in name for name in missing):
        return None
    lines = [statement(f"{scaler}.unscale_({name})") for name in missing]
    return FileEdit("gradients of every optimizer are unscaled before they are clipped", {}, {scene.line: lines})


def _optimizers(scene: FileScene, call: cst.Call) -> list[str]:
    """What `scaler.step(…)` steps: a name, or for the name of a loop, what is in the list that it runs over."""
    name = source_of(call.args[0].value)
    loops = [one for one in find_path(scene.around, call) if isinstance(one, cst.For)]
    loop = next((one for one in reversed(loops) if source_of(one.target) == name), None)
    if loop is None:
        return [name]
    listed = loop.iter
    for one in m.findall(scene.around, m.Assign()):
        made = cst.ensure_type(one, cst.Assign)
        if [source_of(target.target) for target in made.targets] == [source_of(loop.iter)]:
            listed = made.value
    if not isinstance(listed, (cst.List, cst.Tuple)):
        return []
    return [source_of(one.value) for one in listed.elements]
