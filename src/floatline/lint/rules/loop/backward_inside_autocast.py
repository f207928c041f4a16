"""FL210: a backward pass inside autocast."""

from __future__ import annotations

from floatline.causes.dtypes import AUTOCAST_REGION_MISUSE
from floatline.lint.reading.autocast_regions import find_region
from floatline.lint.reading.loop import Unit
from floatline.lint.rules.loop import LoopRule


class BackwardInsideAutocast(LoopRule):
    """Flags `loss.backward()` inside `with torch.autocast(…)`.

    ## Why is this bad?
    Backward operations run in the dtype of their forward by themselves. Inside the region they are cast once more: the
    gradients of what was kept in FP32 with `autocast(enabled=False)` are computed in 16 bits after all (0.4 % off for
    a linear layer in BF16). PyTorch advises against it.
    """

    code = "FL210"
    name = "backward-inside-autocast"
    only_if_selected = True
    cause = AUTOCAST_REGION_MISUSE
    message = (
        "inside autocast the backward pass is cast once more: gradients of what ran in FP32 are computed in 16 bits"
    )
    advice = "end the region after the loss; call backward outside it"
    good = (
        """
import torch
for x, y in batches:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
for x, y in batches:
    with torch.autocast("cuda", enabled=False):
        loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
for x, y in batches:
    with torch.no_grad():
        teacher = model(x)
    loss_fn(teacher, y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    )
    bad = (
        """
import torch
for x, y in batches:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
from torch import autocast as cast
def train(model, optimizer, scaler):
    for x, y in batches:
        with cast("cuda"):
            if len(x):
                scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """
import torch
class Trainer:
    @torch.cuda.amp.autocast()
    def step(self, batch):
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """Backward passes of training steps inside a region."""
        for event in unit.events:
            if event.kind == "backward" and find_region(self.source, event.node) is not None:
                self.report(event.node)
