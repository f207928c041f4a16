"""FL220: gradients that are never set to zero."""

from __future__ import annotations

from floatline.causes.overflow import GRADIENT_OVERFLOW
from floatline.lint.reading.loop import Unit
from floatline.lint.rules.loop import LoopRule

# Functions that train nothing: what they step is thrown away.
_MEASURES = frozenset(("speed", "benchmark", "bench", "profile", "profiling", "warmup", "throughput"))
_SIGNS = ("zero_grad", ".grad = None", "grad.zero_", "set_to_none", "grad.fill_", "_foreach_zero_")


class GradientsNeverZeroed(LoopRule):
    """Flags a loop with a backward pass and a step in every turn, in a file that never empties the gradients.

    ## Why is this bad?
    Every backward pass adds to what is there: after 100 steps the gradients are the sum of 100. The run diverges, and
    in FP16 they pass 65504 on the way, so that a scaler skips more and more steps.
    """

    code = "FL220"
    name = "gradients-never-zeroed"
    title = "Gradients of all steps are added up"
    cause = GRADIENT_OVERFLOW
    message = "nothing in this file sets the gradients to zero: every backward pass adds to those of all steps before"
    advice = "optimizer.zero_grad() in every turn, after the step"
    good = (
        """
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in batches:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
""",
        """
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in batches:
    loss_fn(model(x), y).backward()
    optimizer.step()
    for p in model.parameters():
        p.grad = None
""",
        """
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss_fn(model(x), y).backward()
optimizer.step()
""",
        """
import torch
def model_speed_test(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(10):
        loss_fn(model(x), y).backward()
        optimizer.step()
""",
    )
    bad = (
        """
import torch
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in batches:
    loss_fn(model(x), y).backward()
    optimizer.step()
""",
        """
from torch.optim import AdamW as Optimizer
def train(model):
    optimizer = Optimizer(model.parameters())
    for epoch in range(3):
        for x, y in batches:
            loss_fn(model(x), y).backward()
            optimizer.step()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """Loops that train, in a file without a word of zeroing."""
        if not unit.is_loop or any(sign in self.source.text for sign in _SIGNS):
            return
        if _MEASURES & set(getattr(unit.function, "name", "").lower().split("_")):
            return
        for event in unit.events:
            made = unit.training.optimizers.get(event.target) if event.kind == "step" else None
            if made is None or any(above is unit.node for above in self.source.ancestors(made.call)):
                continue
            self.report(event.node)
            break
