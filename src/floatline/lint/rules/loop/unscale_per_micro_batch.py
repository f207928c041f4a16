"""FL205: accumulated gradients are unscaled once per micro-batch."""

from __future__ import annotations

from floatline.causes.scaler import SCALER_MISUSE
from floatline.lint.reading.loop import Unit
from floatline.lint.rules.loop import LoopRule


class UnscalePerMicroBatch(LoopRule):
    """Flags `scaler.unscale_(optimizer)` that runs again before the optimizer has stepped.

    ## Why is this bad?
    `unscale_` divides everything that is accumulated by the scale. The second call raises "unscale_() has already been
    called"; where an `update()` in between silences that, the earlier micro-batches are divided by 65536 once more,
    and only the last one counts.
    """

    code = "FL205"
    name = "unscale-per-micro-batch"
    cause = SCALER_MISUSE
    message = (
        "this runs again before the optimizer steps: what was accumulated is divided by the scale twice, or it raises"
    )
    advice = "scaler.unscale_(optimizer) once, after the last micro-batch and before clipping"
    good = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(batches):
    scaler.scale(loss_fn(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for group in groups:
    for x, y in group:
        scaler.scale(loss_fn(model(x), y) / 4).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    for one in optimizers:
        scaler.unscale_(one)
    for one in optimizers:
        scaler.step(one)
    scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.unscale_(first)
    scaler.unscale_(second)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
""",
    )
    bad = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(batches):
    scaler.scale(loss_fn(model(x), y) / 4).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        """
from torch.cuda.amp import GradScaler as Scaler
scaler = Scaler()
for group in groups:
    optimizer.zero_grad()
    for x, y in group:
        scaler.scale(loss_fn(model(x), y) / 4).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    scaler.step(optimizer)
""",
        """
import torch
def train(model, optimizer, scaler):
    for i, (x, y) in enumerate(batches):
        scaler.scale(loss_fn(model(x), y) / 4).backward()
        scaler.unscale_(optimizer)
        if (i + 1) % 4:
            continue
        scaler.step(optimizer)
        scaler.update()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """Two turns: the same `unscale_` twice without a step of that optimizer between."""
        if not unit.has("unscale"):
            return
        for way in unit.two_turns:
            unscaled: set[int] = set()
            is_new = False  # a backward pass since
            for event in way.events:
                if event.kind == "backward":
                    is_new = True
                elif event.kind in ("step", "zero"):
                    unscaled.clear()
                elif event.kind == "unscale" and event.owner:
                    if id(event.node) in unscaled and is_new:
                        self.report(event.node)
                    unscaled.add(id(event.node))
                    is_new = False
