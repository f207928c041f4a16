"""FL206: the learning rate's schedule goes on where the scaler skipped the step."""

from __future__ import annotations

import ast

from floatline.causes.scaler import SCHEDULER_VS_SKIPPED_STEP
from floatline.lint.reading.loop import Unit
from floatline.lint.reading.loop_events import dotted
from floatline.lint.rules.loop import LoopRule

_SHOWS_SKIP = frozenset(("get_scale", "_found_inf_per_device", "applied", "found_inf_per_device"))


class ScheduleOnSkippedStep(LoopRule):
    """Flags `scheduler.step()` in every turn of a loop with `scaler.step(optimizer)`, where nothing asks for the scale.

    ## Why is this bad?
    A step with an inf in its gradients is skipped, the first ones nearly always while the scale falls from 65536. The
    schedule counts them all the same: it warns "lr_scheduler.step() before optimizer.step()", and a short warm-up or
    decay is over before the first weight has moved.
    """

    code = "FL206"
    name = "schedule-on-skipped-step"
    cause = SCHEDULER_VS_SKIPPED_STEP
    message = (
        "the schedule moves on although scaler.step may have skipped this step, as it does while the scale settles"
    )
    advice = "before = scaler.get_scale(); …; scaler.update(); if scaler.get_scale() >= before: scheduler.step()"
    good = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
for epoch in range(10):
    for x, y in batches:
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
""",
        """
import torch
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
for x, y in batches:
    loss_fn(model(x), y).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
profiler = torch.profiler.profile()
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    profiler.step()
""",
    )
    bad = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
""",
        """
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR as Schedule
class Trainer:
    def __init__(self):
        self.scaler = GradScaler("cuda")
        self.schedule = Schedule(self.optimizer, warmup)
    def train(self):
        for i, batch in enumerate(self.batches):
            self.scaler.scale(self.loss(batch)).backward()
            if (i + 1) % 4 == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.schedule.step()
""",
        """
import torch
from transformers import get_cosine_schedule_with_warmup
scheduler = get_cosine_schedule_with_warmup(optimizer, 100, 1000)
def train(scaler):
    for x, y in batches:
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """A scheduler's step after a scaler's, where the loop never looks at whether it was made."""
        if not unit.is_loop or not unit.has("schedule") or _looks_at_skip(unit):
            return
        for way in unit.ways:
            stepped = False
            for event in way.events:
                if event.kind == "step":
                    stepped = bool(event.owner)
                elif event.kind == "schedule" and stepped:
                    self.report(event.node)


def _looks_at_skip(unit: Unit) -> bool:
    """Whether the loop asks the scaler what became of the step."""
    for node in ast.walk(unit.node):
        if isinstance(node, ast.Attribute) and node.attr in _SHOWS_SKIP and dotted(node.value):
            return True
    return False
