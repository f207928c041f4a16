"""FL201: gradients clipped, or their norm read, while they are still scaled."""

from __future__ import annotations

from floatline.causes.scaler import CLIP_BEFORE_UNSCALE
from floatline.lint.reading.loop import Unit
from floatline.lint.reading.loop_events import LoopCall
from floatline.lint.rule import Bad
from floatline.lint.rules.loop import LoopRule


class ClipBeforeUnscale(LoopRule):
    """Flags `clip_grad_norm_` between `scaler.scale(loss).backward()` and `scaler.step(optimizer)` without `unscale_`.

    ## Why is this bad?
    The gradients are multiplied by the scale, 65536 at the start. Clipped to a norm of 1.0 and unscaled by the step,
    at most 1.5e-5 is left of them: SGD creeps, and Adam hides it until the scale changes. A norm that is logged there
    is wrong by the same factor.

    ## Fix safety
    Unsafe: the script trains another way, the way that FP32 does.
    """

    code = "FL201"
    name = "clip-of-scaled-gradients"
    cause = CLIP_BEFORE_UNSCALE
    message = (
        "the gradients are still multiplied by the scale, 65536 at the start: clipped to 1.0, 1.5e-5 is left of them"
    )
    advice = "scaler.unscale_(optimizer) before clipping, once per optimizer step"
    fix_safety = "unsafe"
    good = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
            scaler.unscale_(optimizer)
        else:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
""",
        """
import torch
for x, y in batches:
    loss_fn(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    if device == "cuda":
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
""",
    )
    bad = (
        Bad(
            """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
            fixed="""
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        ),
        Bad(
            """
from torch.nn.utils import clip_grad_norm_ as clip
class Trainer:
    def train(self):
        for batch in self.batches:
            if self.amp:
                self.scaler.scale(self.loss(batch)).backward()
                norm = clip(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
""",
            fixed="""
from torch.nn.utils import clip_grad_norm_ as clip
class Trainer:
    def train(self):
        for batch in self.batches:
            if self.amp:
                self.scaler.scale(self.loss(batch)).backward()
                self.scaler.unscale_(self.optimizer)
                norm = clip(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
""",
        ),
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    norms = [p.grad.norm().item() for p in model.parameters()]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """The way through a step on which gradients are clipped between a scaled backward pass and the unscaling."""
        if not unit.has("clip") and not unit.has("norm"):
            return
        for event in _too_early(unit):
            if event.kind == "clip":
                self.report(event.node, fix="unscale-before-clip" if not unit.has("unscale") else None)
            else:
                self.report(
                    event.node,
                    seen="this norm is multiplied by the scale, 65536 at the start and other numbers later",
                )


def _too_early(unit: Unit) -> list[LoopCall]:
    """Clippings of scaled gradients that a scaler's step follows."""
    found: dict[int, LoopCall] = {}
    for way in unit.ways:
        scaled_by = ""
        waiting: list[LoopCall] = []
        for event in way.events:
            if event.kind == "backward":
                scaled_by = event.owner
            elif event.kind in ("unscale", "rescale"):
                found.update({id(one): one for one in waiting if one.kind == "norm"})
                scaled_by, waiting = "", []
            elif event.kind in ("clip", "norm") and scaled_by:
                # Where unscale_ stands under an `if` of its own, and the scaler is made elsewhere: it may be off here.
                if not unit.has("unscale") or not unit.is_switched(scaled_by) or event.kind == "norm":
                    waiting.append(event)
            elif event.kind == "step":
                if event.owner:
                    found.update({id(one): one for one in waiting})
                scaled_by, waiting = "", []
    return sorted(found.values(), key=lambda one: one.node.lineno)
