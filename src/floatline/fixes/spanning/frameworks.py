"""Loops that a framework drives: what must go through Accelerate, Lightning or transformers, and goes past them."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from floatline.fixes.borders import fp32_cast
from floatline.fixes.names import read_cast
from floatline.fixes.operations import bare
from floatline.fixes.scope import find_path
from floatline.fixes.spanning.edits import (
    FileEdit,
    FileScene,
    assigned_in,
    calls_of,
    is_known_at,
    keyword_of,
    own_statement,
    owner_of,
    parameters_of,
)
from floatline.fixes.statements import source_of

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_STEP_HOOK = "on_before_optimizer_step"


def clip_in_framework(scene: FileScene) -> FileEdit | None:
    """`torch.nn.utils.clip_grad_norm_(…)` as `accelerator.clip_grad_norm_(…)`; Lightning's hook after unscaling."""
    calls = [call for name in _CLIPS for call in calls_of(scene.line, name)]
    if len(calls) != 1:
        return None
    if accelerator := _find_accelerator(scene):
        if owner_of(calls[0]) == accelerator:
            return None
        name = calls[0].func.attr if isinstance(calls[0].func, cst.Attribute) else calls[0].func
        function = cst.Attribute(cst.parse_expression(accelerator), cst.ensure_type(name, cst.Name))
        says = "Accelerate unscales the gradients before it clips them"
        return FileEdit(says, {calls[0]: calls[0].with_changes(func=function)}, safe=False)
    return _clip_in_hook(scene)


def _clip_in_hook(scene: FileScene) -> FileEdit | None:
    """`on_after_backward(self)` as `on_before_optimizer_step(self, optimizer)`, which runs on unscaled gradients."""
    hook, home = scene.around, _find_lightning(scene)
    if not isinstance(hook, cst.FunctionDef) or hook.name.value != "on_after_backward" or home is None:
        return None
    if any(cst.ensure_type(one, cst.FunctionDef).name.value == _STEP_HOOK for one in m.findall(home, m.FunctionDef())):
        return None
    given = [*hook.params.params, cst.Param(cst.Name("optimizer"))]
    if len(given) != 2 or "optimizer" in assigned_in(hook):
        return None
    given[0] = given[0].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    new = hook.with_changes(name=cst.Name(_STEP_HOOK), params=hook.params.with_changes(params=given))
    return FileEdit("Lightning calls this hook when it has unscaled the gradients", {hook: new}, safe=False)


def backward_in_framework(scene: FileScene) -> FileEdit | None:
    """`loss.backward()` as `accelerator.backward(loss)`, or as `self.manual_backward(loss)` in a LightningModule."""
    accelerator, lightning = _find_accelerator(scene), _find_lightning(scene)
    calls = calls_of(scene.line, "backward") or calls_of(scene.around, "backward")
    calls = [call for call in calls if owner_of(call) != accelerator]
    if not (accelerator or lightning) or len(calls) != 1 or not isinstance(calls[0].func, cst.Attribute):
        return None
    loss, function = bare(calls[0].func.value), "self.manual_backward"
    if accelerator:
        loss, function = _not_divided(scene, loss), f"{accelerator}.backward"
    args = [cst.Arg(loss), *calls[0].args]
    whole = cst.Call(cst.parse_expression(function), args)
    return FileEdit("the framework scales the loss for its backward pass", {calls[0]: whole}, safe=False)


def _not_divided(scene: FileScene, loss: cst.BaseExpression) -> cst.BaseExpression:
    """`loss` of `loss / n`, where n is what Accelerate divides by itself."""
    if not isinstance(loss, cst.BinaryOperation) or not isinstance(loss.operator, cst.Divide):
        return loss
    own = [keyword_of(call, "gradient_accumulation_steps") for call in calls_of(scene.module, "Accelerator")]
    return bare(loss.left) if source_of(loss.right) in own else loss


def _find_accelerator(scene: FileScene) -> str:
    """The name of an Accelerator that this function can read; '' where there is none."""
    made = [cst.ensure_type(one, cst.Assign) for one in m.findall(scene.module, m.Assign())]
    made = [one for one in made if isinstance(one.value, cst.Call) and one.value in calls_of(one, "Accelerator")]
    names = {source_of(target.target) for one in made for target in one.targets}
    given = parameters_of(scene.around) & {"accelerator"}
    own = assigned_in(scene.around) | parameters_of(scene.around)
    own |= {name for one in scene.module.body if isinstance(one, cst.SimpleStatementLine) for name in assigned_in(one)}
    home = scene.find_class()
    own |= assigned_in(home) if home is not None else set[str]()
    return next(iter(sorted((names & own) | given)), "")


def _find_lightning(scene: FileScene) -> cst.ClassDef | None:
    """The class around the statement, where it is a LightningModule."""
    home = scene.find_class()
    bases = [] if home is None else [source_of(one.value) for one in home.bases]
    return home if any(base.rpartition(".")[2] == "LightningModule" for base in bases) else None


def trainer_precision(scene: FileScene) -> FileEdit | None:
    """`model.half()` as `model.float()`, and `fp16=` for transformers' TrainingArguments, which then uses autocast."""
    casts = [call for call in m.findall(scene.line, m.Call()) if fp32_cast(call, scene.context) is not None]  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    settings = [call for call in calls_of(scene.module, "TrainingArguments") if not any(arg.star for arg in call.args)]
    if len(casts) != 1 or len(settings) != 1:
        return None
    call, arguments = cst.ensure_type(casts[0], cst.Call), settings[0]
    word = read_cast(call, scene.context.names)
    line = own_statement(scene.module, arguments)
    wide = fp32_cast(call, scene.context)
    if not word or wide is None or keyword_of(arguments, word) not in ("", "False") or line is None:
        return None
    when = _condition(scene)
    if not is_known_at(scene, when, line):
        return None
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    kept = [arg for arg in arguments.args if arg.keyword is None or arg.keyword.value != word]
    if not kept:
        return None
    *rest, last = kept
    between = rest[-1].comma if rest else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    new = cst.Arg(cst.parse_expression(when), cst.Name(word), equal=tight, comma=last.comma)
    last = last.with_changes(comma=between)
    edits: dict[cst.CSTNode, cst.CSTNode] = {
        call: wide.node,
        arguments: arguments.with_changes(args=[*rest, last, new]),
    }
    return FileEdit("weights stay in FP32, and the trainer computes in 16 bits", edits)


def _condition(scene: FileScene) -> str:
    """What is asked before the statement runs; True where nothing is."""
    path = find_path(scene.around, scene.line)
    holder = next((one for one in reversed(path) if isinstance(one, cst.If)), None)
    is_first = holder is not None and scene.line in [*m.findall(holder.body, m.SimpleStatementLine())]
    return source_of(holder.test) if holder is not None and is_first else "True"
