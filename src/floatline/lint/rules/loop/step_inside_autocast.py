"""FL209: a region of autocast that goes on over optimizer steps."""

from __future__ import annotations

from floatline.causes.dtypes import AUTOCAST_REGION_MISUSE
from floatline.lint.reading.autocast_regions import find_region
from floatline.lint.reading.loop import Unit
from floatline.lint.reading.loop_events import LOOPS
from floatline.lint.reading.source_tree import keyword
from floatline.lint.rules.loop import LoopRule


class StepInsideAutocast(LoopRule):
    """Flags a loop of training steps inside one `with torch.autocast(…)`.

    ## Why is this bad?
    Autocast keeps its 16-bit copy of each FP32 weight until the outermost region ends. The optimizer moves the weights,
    and the next forward pass uses the old copy: the loss of the same batch is the same in every digit, step after step.
    """

    code = "FL209"
    name = "step-inside-autocast"
    only_if_selected = True
    cause = AUTOCAST_REGION_MISUSE
    message = "one autocast region spans many steps: every forward pass in it uses the first 16-bit copy of the weights"
    advice = "enter torch.autocast in every turn of the loop, around the forward pass and the loss alone"
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
with torch.autocast("cuda", enabled=False):
    for x, y in batches:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        """
import torch
with torch.autocast("cuda", dtype=torch.float16):
    for x, y in batches:
        print(loss_fn(model(x), y))
""",
        """
import torch
with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
    for x, y in batches:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    )
    bad = (
        """
import torch
with torch.autocast("cuda", dtype=torch.float16):
    for x, y in batches:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        """
from torch.cuda.amp import autocast as cast, GradScaler
scaler = GradScaler()
def train(model, optimizer):
    with cast():
        for epoch in range(3):
            for x, y in batches:
                scaler.scale(loss_fn(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
""",
        """
import torch
@torch.autocast("cuda", dtype=torch.bfloat16)
def train(model, optimizer):
    for x, y in batches:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """Steps with a loop between them and the region around them."""
        for event in unit.events:
            found = find_region(self.source, event.node) if event.kind == "step" else None
            if found is None or not any(isinstance(one, LOOPS) for one in found[1]):
                continue
            if keyword(found[0], "cache_enabled") is None:
                self.report(found[0])
