"""Rewrites of training loops: a scaler's missing calls, the new names of torch.amp, FP16 weights that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import libcst as cst
import libcst.matchers as m

from floatline.fixes.expressions import FixContext, NewExpression
from floatline.fixes.scope import find_path
from floatline.fixes.statements import STEP, NewStatements, calls_something, find_scaler, source_of

_DEVICES = {"torch.cuda.amp.": "cuda", "torch.cpu.amp.": "cpu"}
# Positional arguments of torch.cuda.amp.autocast: torch.amp.autocast has them in another order.
_OLD_AUTOCAST = ("enabled", "dtype", "cache_enabled")


def update_after_step(line: cst.SimpleStatementLine, around: cst.CSTNode, scene: FixContext) -> NewStatements | None:
    """`scaler.update()` after `scaler.step(optimizer)`, where the function has none."""
    del scene
    step = m.Call(m.Attribute(attr=m.Name("step")), args=[m.Arg(), m.ZeroOrMore()])
    found = m.findall(line, step)
    if len(line.body) != 1 or not found:
        return None
    owner = cst.ensure_type(cst.ensure_type(found[0], cst.Call).func, cst.Attribute).value
    if calls_something(owner):
        return None
    text = source_of(owner)
    calls = [source_of(cst.ensure_type(call, cst.Call).func) for call in m.findall(around, m.Call(m.Attribute()))]
    if f"{text}.scale" not in calls or f"{text}.update" in calls:
        return None
    return NewStatements((source_of(line.body[0]), f"{text}.update()"), "the scaler moves its scale after every step")


def schedule_after_step(line: cst.SimpleStatementLine, around: cst.CSTNode, scene: FixContext) -> NewStatements | None:
    """`scheduler.step()` only where the scale did not fall: a fallen scale tells that the optimizer made no step."""
    del scene
    scaler = find_scaler(around)
    if not scaler or not m.matches(line, STEP):
        return None
    said = "the scheduler counts the steps that the optimizer made"
    path = find_path(around, line)
    earlier = [one for one in m.findall(around, m.SimpleStatementLine()) if _runs_before(around, one, path)]
    texts = [source_of(one) for one in earlier]
    update = next((at for at in reversed(range(len(texts))) if texts[at].startswith(f"{scaler}.update(")), None)
    if update is None:
        return None
    reads = f" = {scaler}.get_scale()"
    name = next((text.removesuffix(reads) for text in reversed(texts[:update]) if text.endswith(reads)), "")
    new, is_new = name or "scale_before", not name
    if is_new and m.findall(around, m.Name(new)):
        return None
    step = f"if {scaler}.get_scale() >= {new}:\n    {source_of(line)}\n"
    read = (cst.ensure_type(earlier[update], cst.SimpleStatementLine), new + reads) if is_new else None
    return NewStatements((step,), said, read)


def _runs_before(around: cst.CSTNode, node: cst.CSTNode, path: Sequence[cst.CSTNode]) -> bool:
    """Whether a statement stands before another, in its block or in one around it."""
    block = find_path(around, node)[-2]
    below = next((inner for outer, inner in pairwise(path) if outer is block), None)
    return below is not None and block.children.index(node) < block.children.index(below)


def unscaled_penalty(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`torch.autograd.grad(scaler.scale(y), x)` as `torch.autograd.grad(y, x)`."""
    if not isinstance(node, cst.Call) or scene.names.resolve(node.func) != "torch.autograd.grad" or not node.args:
        return None
    scaled = node.args[0].value
    if not m.matches(scaled, m.Call(m.Attribute(attr=m.Name("scale")), args=[m.Arg(keyword=None, star="")])):
        return None
    plain = node.args[0].with_changes(value=cst.ensure_type(scaled, cst.Call).args[0].value)
    return NewExpression(
        node.with_changes(args=[plain, *node.args[1:]]), "the penalty takes gradients without a scale", False
    )


def amp_by_device(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`torch.cuda.amp.autocast(…)` as `torch.amp.autocast("cuda", …)`."""
    if not isinstance(node, cst.Call):
        return None
    path = scene.names.resolve(node.func)
    home = next((home for home in _DEVICES if path.startswith(home)), "")
    name = path.removeprefix(home)
    new = scene.names.spell(f"torch.amp.{name}") if home else None
    if new is None or name not in ("autocast", "GradScaler"):
        return None
    if scene.names.resolve(new) != f"torch.amp.{name}" or any(arg.star for arg in node.args):
        return None
    device = cst.Arg(cst.SimpleString(f'"{_DEVICES[home]}"'))
    given = list(node.args)
    if name == "autocast":
        given = [
            arg if arg.keyword else arg.with_changes(keyword=cst.Name(word), equal=_TIGHT)
            for arg, word in zip(given, _OLD_AUTOCAST + ("",) * len(given), strict=False)
        ]
    says = "the names of torch.amp that take the device; the old ones are deprecated"
    return NewExpression(node.with_changes(func=new, args=[device, *given]), says, True)


def trainable_in_fp32(line: cst.SimpleStatementLine, around: cst.CSTNode, scene: FixContext) -> NewStatements | None:
    """Casts the trainable parameters to FP32 before the optimizer is made over a frozen FP16 base."""
    call = _made(line)
    if call is None or not scene.names.resolve(call.func).startswith("torch.optim.") or not _has_half(around):
        return None
    owners = [
        cst.ensure_type(cst.ensure_type(one, cst.Call).func, cst.Attribute).value
        for one in m.findall(call, m.Call(m.Attribute(attr=m.Name("parameters")), args=[]))
    ]
    models = [source_of(one) for one in owners]
    if len(set(models)) != 1 or any(calls_something(one) for one in owners):
        return None
    cast = (
        f"for parameter in {models[0]}.parameters():\n"
        "    if parameter.requires_grad:\n"
        "        parameter.data = parameter.data.float()\n"
    )
    return NewStatements((cast, source_of(line.body[0])), "what is trained becomes FP32; the frozen base stays in FP16")


_TIGHT = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


def _made(line: cst.SimpleStatementLine) -> cst.Call | None:
    """What `x = call(…)` calls."""
    if len(line.body) != 1 or not isinstance(line.body[0], cst.Assign):
        return None
    value = line.body[0].value
    return value if isinstance(value, cst.Call) else None


def _has_half(around: cst.CSTNode) -> bool:
    half = m.OneOf(
        m.Call(m.Attribute(attr=m.Name("half"))), m.Attribute(attr=m.OneOf(m.Name("float16"), m.Name("half")))
    )
    return bool(m.findall(around, half)) and bool(m.findall(around, m.Call(m.Attribute(attr=m.Name("scale")))))
