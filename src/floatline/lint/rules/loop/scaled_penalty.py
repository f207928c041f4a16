"""FL212: a gradient penalty made of scaled gradients."""

from __future__ import annotations

import ast

from floatline.causes.scaler import SCALED_GRAD_IN_PENALTY
from floatline.lint.reading.loop import Unit
from floatline.lint.rules.loop import LoopRule


class ScaledPenalty(LoopRule):
    """Flags `torch.autograd.grad(scaler.scale(y), x)` whose result is not divided by the scale.

    ## Why is this bad?
    The gradients are 65536 times too large at the start. A penalty such as (norm - 1)^2 is made of them as if they were
    real: far beyond the range of FP16, and wrong at every scale but 1.
    """

    code = "FL212"
    name = "scaled-penalty"
    cause = SCALED_GRAD_IN_PENALTY
    message = "these gradients are multiplied by the scale, 65536 at the start, and the penalty takes them as they are"
    advice = "grads = [g / scaler.get_scale() for g in grads] before the penalty is formed"
    good = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    grads = torch.autograd.grad(scaler.scale(critic(x).sum()), x, create_graph=True)
    grads = [g * (1.0 / scaler.get_scale()) for g in grads]
    scaler.scale(loss_fn(grads)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    grads = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    scaler.scale(loss_fn(grads)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    grads = torch.autograd.grad(scaler.scale(critic(x).sum()), x, create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    scaler.scale(loss_fn(grads[0] * inverse)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    )
    bad = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    grads = torch.autograd.grad(scaler.scale(critic(x).sum()), x, create_graph=True)
    scaler.scale(loss_fn(grads)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
from torch.autograd import grad as gradient
def train(critic, optimizer, scaler):
    for x in batches:
        out = scaler.scale(critic(x).sum())
        slope = gradient(outputs=out, inputs=x, create_graph=True)[0]
        penalty = (slope.norm(2, dim=1) - 1).pow(2).mean()
        scaler.scale(penalty).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    slope = torch.autograd.grad(scaler.scale(critic(x).sum()), x, create_graph=True)[0]
    if careful:
        slope = slope / scaler.get_scale()
    scaler.scale(loss_fn(slope)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """A way from the gradient to the backward pass on which no scale is divided out."""
        if not unit.has("grad"):
            return
        for way in unit.ways:
            waiting: list[ast.expr] = []
            for event in way.events:
                if event.kind == "grad":
                    waiting.append(event.node)
                elif event.kind == "rescale":
                    waiting.clear()
                elif event.kind == "backward":
                    for one in waiting:
                        self.report(one)
                    waiting.clear()
