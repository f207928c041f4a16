"""FL202: the optimizer steps by itself on gradients that a scaler scaled."""

from __future__ import annotations

from floatline.causes.scaler import SCALER_MISUSE
from floatline.lint.reading.loop import Unit
from floatline.lint.rule import Bad
from floatline.lint.rules.loop import LoopRule


class StepBesideScaler(LoopRule):
    """Flags `optimizer.step()` after `scaler.scale(loss).backward()`.

    ## Why is this bad?
    The gradients are multiplied by the scale, 65536 at the start, and nothing divides them again: the learning rate of
    SGD is 65536 times too large. Adam hides the factor, but its eps and weight decay are off by it, and no inf is held
    back.

    ## Fix safety
    Unsafe: the script trains another way, the way that FP32 does.
    """

    code = "FL202"
    name = "step-beside-scaler"
    cause = SCALER_MISUSE
    message = "the gradients are multiplied by the scale, 65536 at the start, and this step takes them as they are"
    advice = "scaler.step(optimizer); scaler.update()"
    fix_safety = "unsafe"
    good = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
        """
import torch
def train(model, optimizer, scaler=None):
    for x, y in batches:
        loss = loss_fn(model(x), y)
        if scaler is not None:
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
scaler = torch.amp.GradScaler("cuda")
critic_optimizer = torch.optim.SGD(critic.parameters(), 0.1)
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    critic(x).mean().backward()
    critic_optimizer.step()
""",
    )
    bad = (
        Bad(
            """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    optimizer.step()
""",
            fixed="""
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        ),
        Bad(
            """
from torch.cuda.amp import GradScaler as Scaler
from torch import optim
class Trainer:
    def __init__(self):
        self.scaler = Scaler()
        self.optimizer = optim.SGD(self.model.parameters(), 0.1)
    def step(self, batch):
        self.scaler.scale(self.loss(batch)).backward()
        self.optimizer.step()
        self.scaler.update()
""",
            fixed="""
from torch.cuda.amp import GradScaler as Scaler
from torch import optim
class Trainer:
    def __init__(self):
        self.scaler = Scaler()
        self.optimizer = optim.SGD(self.model.parameters(), 0.1)
    def step(self, batch):
        self.scaler.scale(self.loss(batch)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
        ),
        Bad(
            """
import torch
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for x, y in batches:
    loss = scaler.scale(loss_fn(model(x), y))
    loss.backward()
    if careful:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
""",
            fixed="""
import torch
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for x, y in batches:
    loss = scaler.scale(loss_fn(model(x), y))
    loss.backward()
    if careful:
        scaler.step(optimizer)
        scaler.update()
    else:
        scaler.step(optimizer)
        scaler.update()
""",
        ),
    )

    def visit_unit(self, unit: Unit) -> None:
        """The way through a step on which an optimizer meets scaled gradients."""
        direct = {e.target for e in unit.events if e.kind == "step" and not e.owner}
        if not direct:
            return
        handled = {e.target for e in unit.events if e.kind == "step" and e.owner}
        for way in unit.ways:
            scaler = ""
            for event in way.events:
                if event.kind == "backward":
                    scaler = event.owner
                elif event.kind == "rescale" or (event.kind == "step" and event.owner):
                    scaler = ""
                elif event.kind == "step" and scaler and not _is_off(unit, scaler, event.target in handled):
                    self.report(event.node, fix="step-through-scaler")


def _is_off(unit: Unit, scaler: str, is_handled: bool) -> bool:
    """Whether the scaler may be off here: it is made elsewhere, and another branch steps through it."""
    return unit.training.is_off(scaler) or (is_handled and unit.is_switched(scaler))
