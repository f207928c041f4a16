"""16-bit weights that are trained: the model stays in FP32, and its forward passes run under autocast."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from floatline.fixes.borders import fp32_cast
from floatline.fixes.operations import is_simple
from floatline.fixes.scope import find_path
from floatline.fixes.spanning.edits import (
    FileEdit,
    FileScene,
    Statement,
    calls_of,
    names_in,
    own_statement,
    parameters_of,
    statement,
)
from floatline.fixes.statements import source_of

# Methods of a model that compute nothing.
_NOT_FORWARD = frozenset(
    """parameters named_parameters buffers named_buffers modules named_modules children named_children state_dict
    load_state_dict zero_grad requires_grad_ train eval to cuda cpu float half bfloat16 apply""".split()  # noqa: SIM905
)
_HALVES = {"half": "torch.float16", "bfloat16": "torch.bfloat16"}


@dataclass(frozen=True)
class _Model:
    """A model that is cast to 16 bits, and the statements that call it."""

    name: str
    cast: cst.Call
    dtype: str
    forwards: list[cst.SimpleStatementLine]


def autocast_forward(scene: FileScene) -> FileEdit | None:
    """`model.half()` as `model.float()`, and `model(x)` under autocast with the dtype of the cast."""
    autocast = scene.context.names.spell("torch.autocast")
    own = _read_cast(scene, scene.line)
    lines = [cst.ensure_type(one, cst.SimpleStatementLine) for one in m.findall(scene.around, m.SimpleStatementLine())]
    found = [own] if own is not None else [one for line in lines if (one := _read_cast(scene, line)) is not None]
    if scene.context.names.has_autocast or autocast is None or len(found) != 1:
        return None
    model = found[0]
    wide = fp32_cast(model.cast, scene.context)
    if wide is None or _goes_elsewhere(scene, model.name):
        return None
    region = f"{source_of(autocast)}(next({model.name}.parameters()).device.type, dtype={model.dtype})"
    nodes: dict[cst.CSTNode, cst.CSTNode | list[Statement]] = {model.cast: wide.node}
    for line in model.forwards:
        new = _under(scene, region, line)
        if new is None:
            return None
        nodes[line] = new
    return FileEdit("weights stay in FP32, and autocast computes in 16 bits", nodes)


def _read_cast(scene: FileScene, line: cst.SimpleStatementLine) -> _Model | None:
    """The model that a statement casts to 16 bits, where the function calls it afterwards."""
    casts = [call for call in _calls(line) if fp32_cast(call, scene.context) is not None]
    name = _find_model(line, casts[0]) if len(casts) == 1 else ""
    dtype = _dtype_of(casts[0], scene) if name else ""
    forwards = _find_forwards(scene, name, line) if dtype else []
    return _Model(name, casts[0], dtype, forwards) if forwards else None


def _calls(line: cst.CSTNode) -> list[cst.Call]:
    return [cst.ensure_type(one, cst.Call) for one in m.findall(line, m.Call())]


def _find_model(line: cst.SimpleStatementLine, cast: cst.Call) -> str:
    """The name that holds the model after a cast: `model = Net().half()`, or `model.half()` by itself."""
    part = line.body[0]
    if len(line.body) != 1:
        return ""
    if isinstance(part, cst.Expr) and part.value is cast and isinstance(cast.func, cst.Attribute):
        return source_of(cast.func.value) if is_simple(cast.func.value) else ""
    if not isinstance(part, cst.Assign) or len(part.targets) != 1 or not is_simple(part.targets[0].target):
        return ""
    value: cst.BaseExpression = part.value
    while value is not cast:  # model = Net().half().cuda()
        if not isinstance(value, cst.Call) or not isinstance(value.func, cst.Attribute):
            return ""
        value = value.func.value
    return source_of(part.targets[0].target)


def _dtype_of(cast: cst.Call, scene: FileScene) -> str:
    """The 16-bit dtype of a cast, in the file's words; '' where that is a name which may mean something else later."""
    name = cast.func.attr.value if isinstance(cast.func, cst.Attribute) else ""
    if name in _HALVES:
        spelled = scene.context.names.spell(_HALVES[name])
        return "" if spelled is None else source_of(spelled)
    known = [arg.value for arg in cast.args if scene.context.names.resolve(arg.value).startswith("torch.")]
    found = [source_of(one) for one in known if scene.context.names.resolve(one).endswith(("float16", "half"))]
    return found[0] if len(found) == 1 else ""


def _find_forwards(scene: FileScene, model: str, cast: cst.CSTNode) -> list[cst.SimpleStatementLine]:
    """The statements behind the cast that call the model; none where one of them is no statement of a block."""
    calls = [call for call in _calls(scene.around) if source_of(call.func) == model]
    lines: list[cst.SimpleStatementLine] = []
    for call in calls:
        line = own_statement(scene.around, call)
        in_block = line is not None and isinstance(find_path(scene.around, line)[-2], (cst.IndentedBlock, cst.Module))
        if line is None or not in_block or not scene.is_before(cast, line):
            return []
        if line not in lines:
            lines.append(line)
    return lines


def _goes_elsewhere(scene: FileScene, model: str) -> bool:
    """Whether other code is handed the model, and may call it with what it was: 16 bits."""
    args = [cst.ensure_type(one, cst.Arg) for one in m.findall(scene.around, m.Arg())]
    others = [one for one in m.findall(scene.module, m.FunctionDef()) if one is not scene.around]
    others = [one for one in others if one not in find_path(scene.module, scene.line)]
    shared = "." in model or isinstance(scene.around, cst.Module)
    root = model.partition(".")[0]
    called = shared and any(source_of(call.func) == model for one in others for call in _calls(one))
    methods = [source_of(call.func) for call in _calls(scene.module) if source_of(call.func).startswith(f"{model}.")]
    called |= any(name.removeprefix(f"{model}.") not in _NOT_FORWARD for name in methods)
    return called or any(source_of(arg.value) == model for arg in args) or root in _captured(scene, others)


def _captured(scene: FileScene, others: list[cst.CSTNode]) -> set[str]:
    """Names that functions inside this one read."""
    inner = [one for one in others if find_path(scene.around, one)] if scene.around is not scene.module else []
    return {name for one in inner for name in names_in(one)}


def _under(scene: FileScene, region: str, line: cst.SimpleStatementLine) -> list[Statement] | None:
    """A statement in a region; a backward pass in it stands behind the region. None where that cannot be done."""
    whole = cst.ensure_type(statement(f"with {region}:\n    pass\n"), cst.With)
    inner, behind = line, list[Statement]()
    if calls_of(line, "backward"):
        found = line.body[0].value if len(line.body) == 1 and isinstance(line.body[0], cst.Expr) else None
        taken = names_in(scene.around) | parameters_of(scene.around)
        if not m.matches(found, m.Call(m.Attribute(attr=m.Name("backward")))) or "loss" in taken:  # type: ignore[arg-type]
            return None
        call = cst.ensure_type(found, cst.Call)
        function = cst.ensure_type(call.func, cst.Attribute)
        made = cst.Assign([cst.AssignTarget(cst.Name("loss"))], function.value)
        inner = cst.SimpleStatementLine([made])
        back = cst.Expr(call.with_changes(func=function.with_changes(value=cst.Name("loss"))))
        behind.append(line.with_changes(body=[back], leading_lines=()))
    body = cst.IndentedBlock([inner.with_changes(leading_lines=())])
    return [whole.with_changes(body=body, leading_lines=line.leading_lines), *behind]
