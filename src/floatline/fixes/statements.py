"""Statements of a training loop, or of a constructor, that are wrong in themselves: what stands there instead."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from floatline.fixes.expressions import FixContext
from floatline.fixes.scope import are_alternatives

STEP = m.SimpleStatementLine([m.Expr(m.Call(m.Attribute(attr=m.Name("step")), args=[]))])
_MAKERS = ("rand", "randn", "zeros", "ones", "full", "empty", "tensor")


@dataclass(frozen=True)
class NewStatements:
    """What replaces one statement.

    Args:
        statements: As source, one each.
        says: What was done, as one line.
        earlier: Another statement, and what is put before it.
    """

    statements: tuple[str, ...]
    says: str
    earlier: tuple[cst.SimpleStatementLine, str] | None = None


def unscale_before_clip(line: cst.SimpleStatementLine, around: cst.CSTNode, scene: FixContext) -> NewStatements | None:
    """`scaler.unscale_(optimizer)` before gradients are clipped."""
    text = source_of(line)
    scaler, optimizer = find_scaler(around), _find_optimizer(around)
    called = [scene.names.resolve(cst.ensure_type(call, cst.Call).func) for call in m.findall(line, m.Call())]
    if not any("clip_grad" in path for path in (text, *called)) or not scaler or not optimizer:
        return None
    return NewStatements((f"{scaler}.unscale_({optimizer})", text), "gradients are unscaled before they are clipped")


def step_through_scaler(line: cst.SimpleStatementLine, around: cst.CSTNode, scene: FixContext) -> NewStatements | None:
    """`scaler.step(optimizer)` instead of `optimizer.step()`."""
    del scene
    scaler = find_scaler(around)
    if not scaler or not m.matches(line, STEP):
        return None
    optimizer = source_of(line).strip().removesuffix(".step()")
    updates = m.findall(around, m.Attribute(attr=m.Name("update")))
    own = [one for one in updates if source_of(cst.ensure_type(one, cst.Attribute).value) == scaler]
    has_update = any(not are_alternatives(around, line, one) for one in own)
    update = () if has_update else (f"{scaler}.update()",)
    return NewStatements((f"{scaler}.step({optimizer})", *update), "the scaler unscales, checks and makes the step")


def bare_parameter(line: cst.SimpleStatementLine, around: cst.CSTNode, scene: FixContext) -> NewStatements | None:
    """`self.x = torch.rand(…, requires_grad=True)` as a parameter, which optimizers see."""
    del around
    new = scene.names.spell("torch.nn.Parameter")
    if len(line.body) != 1 or not isinstance(line.body[0], cst.Assign) or new is None:
        return None
    assign = line.body[0]
    target, value = assign.targets[0].target, assign.value
    owned = m.matches(target, m.Attribute(m.Name("self")))
    if (
        not owned
        or not isinstance(value, cst.Call)
        or scene.names.resolve(value.func).rpartition(".")[2] not in _MAKERS
    ):
        return None
    trained = [arg for arg in value.args if arg.keyword is not None and arg.keyword.value == "requires_grad"]
    if not trained or source_of(trained[0].value) != "True":
        return None
    rest = [arg for arg in value.args if arg is not trained[0]]
    if rest:
        rest[-1] = rest[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    made = cst.Call(new, [cst.Arg(value.with_changes(args=rest))])
    return NewStatements(
        (source_of(assign.with_changes(value=made)),), "a bare tensor becomes a parameter of the module"
    )


def find_scaler(around: cst.CSTNode) -> str:
    """The name of what scales the loss: `scaler.scale(loss).backward()`."""
    for node in m.findall(around, m.Call(m.Attribute(m.Name() | m.Attribute(), m.Name("scale")))):
        return source_of(cst.ensure_type(cst.ensure_type(node, cst.Call).func, cst.Attribute).value)
    return ""


def _find_optimizer(around: cst.CSTNode) -> str:
    """What the scaler steps, or what is stepped itself."""
    scaler = find_scaler(around)
    for node in m.findall(around, m.Call(m.Attribute(attr=m.Name("step")), args=[m.Arg(), m.ZeroOrMore()])):
        call = cst.ensure_type(node, cst.Call)
        if source_of(cst.ensure_type(call.func, cst.Attribute).value) == scaler:  # not scheduler.step(epoch)
            return "" if calls_something(call.args[0].value) else source_of(call.args[0].value)
    return ""


def calls_something(node: cst.CSTNode) -> bool:
    """Whether it may not be written once more, since writing it once more calls it once more."""
    return bool(m.findall(node, m.Call()))


def source_of(node: cst.CSTNode) -> str:
    """What stands there, without the comments around it."""
    if isinstance(node, cst.SimpleStatementLine):
        return "; ".join(cst.Module([]).code_for_node(part) for part in node.body).strip()
    return cst.Module([]).code_for_node(node)
