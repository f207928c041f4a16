"""FL219: a scaler steps on gradients that were never scaled."""

from __future__ import annotations

import ast

from floatline.causes.scaler import SCALER_MISUSE
from floatline.lint.reading.loop import Unit
from floatline.lint.reading.loop_events import dotted
from floatline.lint.rules.loop import LoopRule


class UnscaledLoss(LoopRule):
    """Flags `scaler.step(optimizer)` after `loss.backward()` without `scaler.scale`.

    ## Why is this bad?
    `step` divides the gradients by the scale, 65536 at the start, although nothing multiplied them: SGD creeps, and
    small gradients were lost in FP16 before, which the scale was there to prevent. Where no loss was ever scaled, it
    raises.
    """

    code = "FL219"
    name = "unscaled-loss"
    cause = SCALER_MISUSE
    message = "scaler.step divides these gradients by the scale, 65536 at the start, and nothing multiplied them"
    advice = "scaler.scale(loss).backward()"
    good = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    loss = scaler.scale(loss_fn(model(x), y))
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
def train(model, optimizer, scaler, amp):
    for x, y in batches:
        loss = loss_fn(model(x), y)
        if amp:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda", enabled=False)
for x, y in batches:
    loss_fn(model(x), y).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    )
    bad = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    loss = loss_fn(model(x), y)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
from torch.cuda.amp import GradScaler as Scaler
scaler = Scaler()
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(first)
    penalty(model).backward()
    scaler.step(second)
    scaler.update()
""",
        """
import torch
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")
    def step(self, batch):
        self.loss(batch).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """A way on which a plain backward pass comes before a scaler's step."""
        if not any(event.kind == "backward" and not event.owner for event in unit.events):
            return
        for way in unit.ways:
            plain: ast.expr | None = None
            for event in way.events:
                if event.kind == "backward":
                    plain = None if event.owner else event.node
                elif event.kind == "step":
                    if event.owner and plain is not None and self._is_sure(unit, event.owner):
                        self.report(plain)
                    plain = None

    def _is_sure(self, unit: Unit, scaler: str) -> bool:
        """Whether the scaler is on, and the loss cannot have been scaled out of sight."""
        if unit.training.is_off(scaler) or scaler not in unit.training.scalers:
            return False
        last = scaler.rpartition(".")[2]
        scales = [
            call
            for call in ast.walk(self.source.tree)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "scale"
            and dotted(call.func.value).rpartition(".")[2] == last
        ]
        return not scales or (unit.has("backward", owner=scaler) and not unit.is_switched(scaler))
