"""FL207: a scaler that is made again in a loop around the training."""

from __future__ import annotations

import ast

from floatline.causes.scaler import SCALER_STATE_LOST
from floatline.lint.reading.loop import read_training
from floatline.lint.reading.loop_events import LOOPS, dotted
from floatline.lint.reading.source_tree import parameters
from floatline.lint.rule import Rule


class ScalerPerEpoch(Rule):
    """Flags `GradScaler(…)` inside the loop whose optimizer was made before it.

    ## Why is this bad?
    A new scaler starts at 65536 and counts its 2000 steps to the next doubling again. A model that needs 64 pays 10
    skipped steps in every epoch, and a scaler that lives for one step never moves at all.
    """

    code = "FL207"
    name = "scaler-per-epoch"
    cause = SCALER_STATE_LOST
    message = "a new scaler in every turn of the loop forgets its scale: 65536 again, and the skipped steps that follow"
    advice = "make the scaler once, before the loop"
    words = ("GradScaler",)
    good = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for epoch in range(3):
    for x, y in batches:
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """
import torch
for fold in folds:
    optimizer = torch.optim.AdamW(make(fold).parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x, y in fold:
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """
import torch
scalers = {}
for name in names:
    scalers[name] = torch.amp.GradScaler("cuda")
""",
        """
import torch
for trial in range(3):
    model, optimizer = make_both(trial)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in batches:
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    )
    bad = (
        """
import torch
for epoch in range(3):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in batches:
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """
from torch.cuda.amp import GradScaler as Scaler
def train(model, optimizer):
    for x, y in batches:
        scaler = Scaler()
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """
import torch
optimizer = torch.optim.AdamW(model.parameters())
while not done:
    with torch.autocast("cuda"):
        loss = loss_fn(model(x), y)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    )

    def visit_Module(self, node: ast.Module) -> None:  # noqa: N802
        """Scalers made in a loop that steps an optimizer from before it."""
        del node
        for name, made in read_training(self.source).made_scalers:
            loop = next((above for above in self.source.ancestors(made.call) if isinstance(above, LOOPS)), None)
            if loop is None or self.source.function(loop) is not made.function:
                if not _runs_each_epoch(made.function):
                    continue
                loop = made.function
            stepped = [
                dotted(call.args[0])
                for call in ast.walk(loop)
                if isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr == "step"
                and call.args
                and dotted(call.func.value) == name
            ]
            made_inside = {
                dotted(one)
                for one in ast.walk(loop)
                if isinstance(getattr(one, "ctx", None), ast.Store) and dotted(one)
            }
            if stepped and not made_inside & set(stepped):
                self.report(made.call)


def _runs_each_epoch(function: ast.AST) -> bool:
    """`def train_one_epoch(model, loader, epoch)`: it is given the number of its epoch, or named for one."""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    words = function.name.lower().split("_")
    return "epoch" in words or bool({"epoch", "epoch_idx", "cur_epoch"} & set(parameters(function)))
