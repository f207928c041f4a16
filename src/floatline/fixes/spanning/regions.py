"""Regions in FP32: a loop whose values grow from turn to turn, and the layer that a large input enters."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from floatline.fixes.borders import WidenInputs, find_owner, read_module_call
from floatline.fixes.operations import float_of, read_number
from floatline.fixes.scope import find_path
from floatline.fixes.spanning.edits import (
    LOOPS,
    FileEdit,
    FileScene,
    assigned_in,
    calls_of,
    names_in,
    parameters_of,
    statement,
)
from floatline.fixes.statements import source_of

# What may compute its parts later, several times, or not at all.
_NOT_ALWAYS = (cst.IfExp, cst.BooleanOperation, cst.Lambda, cst.BaseComp, cst.NamedExpr)


def fp32_loop(scene: FileScene) -> FileEdit | None:
    """A loop that carries a tensor from turn to turn, in FP32 and without autocast."""
    loops = [node for node in scene.path_to(scene.line) if isinstance(node, LOOPS) and _is_plain(node)]
    autocast = scene.context.names.spell("torch.autocast")
    carried = _find_carried(scene)
    if not loops or autocast is None or not carried:
        return None
    loop = loops[0]
    wide = loop.visit(WidenInputs(scene.context))
    if not isinstance(wide, LOOPS) or not _is_tensor_before(scene, carried, loop):
        return None
    cast = cst.ensure_type(statement(f"{carried} = {carried}.float()"), cst.SimpleStatementLine)
    region = cst.parse_expression(f"{source_of(autocast)}({carried}.device.type, enabled=False)")
    body = cst.IndentedBlock([cast, wide.with_changes(leading_lines=())])
    whole = cst.With([cst.WithItem(region)], body, leading_lines=loop.leading_lines)
    return FileEdit(f"the loop is computed in FP32, without autocast: {carried} grows in it", {loop: whole})


def _find_carried(scene: FileScene) -> str:
    """x of `x = f(x)`; '' for any other statement."""
    if len(scene.line.body) != 1:
        return ""
    part = scene.line.body[0]
    if isinstance(part, cst.AugAssign) and isinstance(part.target, cst.Name):
        return part.target.value
    if not isinstance(part, cst.Assign) or len(part.targets) != 1 or not isinstance(part.targets[0].target, cst.Name):
        return ""
    name = part.targets[0].target.value
    return name if name in names_in(part.value) else ""


def _is_plain(loop: cst.CSTNode) -> bool:
    """Whether a loop computes, and neither trains nor hands out values while a region is open."""
    return not calls_of(loop, "backward") and not m.findall(loop, m.Yield() | m.Await() | m.Global() | m.Nonlocal())


def _is_tensor_before(scene: FileScene, name: str, loop: cst.CSTNode) -> bool:
    """Whether a name is there before a loop, and no number, list or None."""
    made = [one for one in m.findall(scene.around, m.Assign()) if name in assigned_in(one)]
    values = [cst.ensure_type(one, cst.Assign).value for one in made if scene.is_before(one, loop)]
    if not values:
        return name in parameters_of(scene.around, with_defaults=False)
    kinds = (cst.List, cst.Tuple, cst.Dict, cst.ListComp, cst.BaseString)
    return not any(read_number(one) is not None or isinstance(one, kinds) or _is_word(one) for one in values)


def _is_word(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Name) and node.value in ("None", "True", "False")


def fp32_first(scene: FileScene) -> FileEdit | None:
    """`self.body(x)` with the layers up to the one that failed in FP32, where body is a Sequential."""
    names, (attribute, _, index) = scene.context.names, scene.context.part.rpartition(".")
    autocast = names.spell("torch.autocast")
    calls = [one for one in m.findall(scene.line, m.Call()) if _is_call_of(cst.ensure_type(one, cst.Call), attribute)]
    if autocast is None or not index.isdigit() or len(calls) != 1 or len(scene.line.body) != 1:
        return None
    whole = cst.ensure_type(calls[0], cst.Call)
    argument = read_module_call(whole, scene.context)
    owner = None if argument is None else find_owner(argument)
    if argument is None or owner is None or not _is_sequential(scene, source_of(whole.func)):
        return None
    if "first" in names_in(scene.around) | parameters_of(scene.around) or not _is_first_read(scene.line, whole):
        return None
    body, end = source_of(whole.func), int(index) + 1
    wide = source_of(float_of(argument, names))
    region = f"{source_of(autocast)}({source_of(owner)}.device.type, enabled=False)"
    layers = statement(f"with {region}:\n    first = {body}[:{end}]({wide})\n")
    rest = cst.parse_expression(f"{body}[{end}:](first)")
    return FileEdit(
        "the layer that the input enters is computed in FP32, without autocast", {whole: rest}, {scene.line: [layers]}
    )


def _is_call_of(call: cst.Call, attribute: str) -> bool:
    """Whether `self.body(…)` is called, for the module 'body' of this or of a larger model."""
    called = source_of(call.func).removeprefix("self.")
    return bool(attribute) and called != source_of(call.func) and f".{attribute}".endswith(f".{called}")


def _is_sequential(scene: FileScene, name: str) -> bool:
    """Whether the class makes the attribute once, as a Sequential of layers that are written out."""
    home = scene.find_class()
    made = [] if home is None else [one for one in m.findall(home, m.Assign()) if name in assigned_in(one)]
    value = cst.ensure_type(made[0], cst.Assign).value if len(made) == 1 else None
    if not isinstance(value, cst.Call) or scene.context.names.resolve(value.func) != "torch.nn.Sequential":
        return False
    return len(value.args) > 1 and not any(arg.star for arg in value.args)


def _is_first_read(line: cst.SimpleStatementLine, call: cst.Call) -> bool:
    """Whether a call runs first of all in its statement, and always: what is taken out of it runs earlier."""
    path = find_path(line, call)
    others = [one for one in m.findall(line, m.Call()) if one not in path and one not in m.findall(call, m.Call())]
    return not others and not any(isinstance(one, _NOT_ALWAYS) for one in path)
