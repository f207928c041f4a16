"""FL217: gradients of several micro-batches are added and not averaged."""

from __future__ import annotations

import ast

from floatline.causes.overflow import GRADIENT_OVERFLOW
from floatline.lint.reading.loop import Unit
from floatline.lint.reading.loop_events import dotted
from floatline.lint.rules.loop import LoopRule

_DIVIDES = frozenset(("div", "div_", "mul_", "mul", "no_sync", "accumulate"))


class AccumulationNotDivided(LoopRule):
    """Flags `if (i + 1) % n == 0: optimizer.step()` where the loss is nowhere divided by n.

    ## Why is this bad?
    Gradients add up over the n backward passes: they are n times those of the large batch, and so are the numbers that
    FP16 has to hold. SGD runs at n times its learning rate, and clipping cuts n times as much.
    """

    code = "FL217"
    name = "accumulation-not-divided"
    title = "Accumulated gradients are not averaged"
    cause = GRADIENT_OVERFLOW
    message = "the gradients of several micro-batches are added here, and the loss is never divided by their number"
    advice = "(loss / n).backward(), with the n that the step waits for"
    good = (
        """
import torch
for i, (x, y) in enumerate(batches):
    loss = loss_fn(model(x), y) / n
    loss.backward()
    if (i + 1) % n == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        """
import torch
for i, (x, y) in enumerate(batches):
    loss = loss_fn(model(x), y)
    loss = scale_down(loss, n)
    loss.backward()
    if (i + 1) % n == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        """
import torch
for i, (x, y) in enumerate(batches):
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if (i + 1) % n == 0:
        print(i)
""",
        """
import torch
def train(n):
    optimizer = torch.optim.SGD(model.parameters(), 0.1 / n)
    for i, (x, y) in enumerate(batches):
        loss_fn(model(x), y).backward()
        if (i + 1) % n == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    )
    bad = (
        """
import torch
for i, (x, y) in enumerate(batches):
    loss = loss_fn(model(x), y)
    loss.backward()
    if (i + 1) % n == 0:
        optimizer.step()
        optimizer.zero_grad()
    total += loss.detach()
    mean = total / (i + 1)
""",
        """
from torch.cuda.amp import GradScaler as Scaler
scaler = Scaler()
for i, (x, y) in enumerate(batches):
    scaler.scale(loss_fn(model(x), y)).backward()
    if i % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        """
import torch
def train(model, optimizer, args):
    for i, batch in enumerate(loader):
        loss = model(**batch).loss
        loss.backward()
        if (i + 1) % args.accumulate != 0:
            continue
        optimizer.step()
        optimizer.zero_grad()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """A backward pass in every turn, a step in some, and no number of turns in the loss."""
        if not unit.is_loop:
            return
        backward = [event for event in unit.events if event.kind == "backward"]
        count = _num_micro_batches(unit)
        if len(backward) == 1 and count is not None and self._is_bare(unit, backward[0].node, count):
            self.report(backward[0].node)

    def _is_bare(self, unit: Unit, node: ast.expr, count: ast.expr) -> bool:
        """Whether nothing divides by the number or hands it on, and the loss is no product or quotient."""
        inside = {id(one) for one in ast.walk(unit.node)}
        text, last = ast.unparse(count), dotted(count).rpartition(".")[2]
        losses = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        bare = not _is_product(node)
        for one in ast.walk(unit.function):
            if isinstance(one, (ast.BinOp, ast.AugAssign)) and isinstance(one.op, (ast.Div, ast.Mult)):
                if any(ast.unparse(side) == text for side in ast.walk(one) if isinstance(side, ast.expr)):
                    return False
                if isinstance(one, ast.AugAssign) and dotted(one.target) in losses:
                    return False
            elif isinstance(one, ast.Call) and id(one) in inside:
                given = [*one.args, *(word.value for word in one.keywords)]
                if last and any(dotted(arg).rpartition(".")[2] == last for arg in given):
                    return False
                if isinstance(one.func, ast.Attribute) and one.func.attr in _DIVIDES:
                    return False
            elif isinstance(one, ast.Assign) and losses & {dotted(target) for target in one.targets}:
                bare = bare and not _is_product(one.value)
        return bare


def _is_product(node: ast.expr) -> bool:
    return any(isinstance(one, ast.BinOp) and isinstance(one.op, (ast.Div, ast.Mult)) for one in ast.walk(node))


def _num_micro_batches(unit: Unit) -> ast.expr | None:
    """n of `(i + 1) % n`, where that test decides whether the turn steps and empties the gradients."""
    stepping = {id(event.node) for event in unit.events if event.kind == "step"}
    for place, one in enumerate(unit.body):
        if not isinstance(one, ast.If):
            continue
        modulo = [
            part
            for part in ast.walk(one.test)
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and not isinstance(part.left, ast.Constant)
        ]
        if not modulo:
            continue
        inside = {id(part) for part in ast.walk(one)}
        skips = len(one.body) > 0 and isinstance(one.body[-1], ast.Continue) and not one.orelse
        after = {id(part) for later in unit.body[place + 1 :] for part in ast.walk(later)}
        if stepping and (stepping <= inside or (skips and stepping <= after)):
            zeroed = {id(event.node) for event in unit.events if event.kind == "zero"}
            where = inside if stepping <= inside else after
            return modulo[0].right if zeroed and zeroed <= where else None
    return None
