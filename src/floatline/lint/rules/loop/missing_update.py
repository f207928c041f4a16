"""FL203: a scaler whose `update()` is missing, or is not reached after every step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from floatline.causes.scaler import SCALER_MISUSE
from floatline.lint.reading.branches import Way
from floatline.lint.reading.loop import Unit
from floatline.lint.reading.loop_events import LoopCall, dotted
from floatline.lint.reading.tensors import asks_for_finite
from floatline.lint.rule import Bad
from floatline.lint.rules.loop import LoopRule


class MissingUpdate(LoopRule):
    """Flags `scaler.step(optimizer)` that no `scaler.update()` follows, and a `continue` that jumps over it.

    ## Why is this bad?
    Only `update()` ends an iteration of the scaler. Without it the second `step` raises "step() has already been called
    since the last update()". A `continue` on gradients that are not finite is worse: the scale never falls, so the next
    batch overflows as this one did; after `unscale_`, the next `unscale_` raises too.

    ## Fix safety
    Unsafe: the script goes on where it raised.
    """

    code = "FL203"
    name = "missing-update"
    cause = SCALER_MISUSE
    message = "no scaler.update() follows this step: the second step raises, and the scale never moves"
    advice = "scaler.update() after scaler.step(optimizer), once, also where the step was skipped"
    fix_safety = "unsafe"
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
for i, (x, y) in enumerate(batches):
    scaler.scale(loss_fn(model(x), y) / 4).backward()
    if (i + 1) % 4:
        continue
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    loss = loss_fn(model(x), y)
    if not torch.isfinite(loss):
        continue
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    finish(scaler)
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    overflows = False
    for p in model.parameters():
        if p.grad is not None and not torch.isfinite(p.grad).all():
            overflows = True
    if overflows:
        print("this step is skipped")
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
    scaler.step(optimizer)
    optimizer.zero_grad()
""",
            fixed="""
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
        ),
        """
import torch as t
from torch.nn.utils import clip_grad_norm_
scaler = t.cuda.amp.GradScaler()
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), 1.0)
    if not t.isfinite(norm):
        continue
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    if loss.isnan().any():
        optimizer.zero_grad()
        continue
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    overflows = False
    for p in model.parameters():
        if p.grad is not None and (torch.isnan(p.grad).any() or torch.isinf(p.grad).any()):
            overflows = True
            break
    if overflows:
        scaler.update()
        continue
    scaler.step(optimizer)
    scaler.update()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """Steps without an update in the whole file, then turns of a loop that end without one."""
        for event in unit.events:
            if event.kind == "step" and event.owner and not self._is_updated(event.owner):
                self.report(event.node, fix="update-after-step")
        for event in _early_updates(unit):
            self.report(
                event.node,
                seen='scaler.update() without a step or unscale_ before it raises "No inf checks were recorded"',
                advice="leave the check to scaler.step(optimizer), which skips the step by itself",
            )
        if unit.is_loop and unit.has("update"):
            for jump, begun in _jumps_over(unit):
                then = "the next unscale_ or step raises" if begun else "the scale cannot fall after an overflow"
                self.report(
                    jump,
                    seen=f"this turn ends after a scaled backward pass without scaler.update(): {then}",
                    advice="leave the check to scaler.step(optimizer), or call scaler.update() before continue",
                )

    def _is_updated(self, scaler: str) -> bool:
        """Whether the file updates it anywhere, or hands it to something that may."""
        last = scaler.rpartition(".")[2]
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Call):
                continue
            if dotted(node.func).endswith(f"{last}.update"):
                return True
            given = [*node.args, *(word.value for word in node.keywords)]
            if any(dotted(arg).rpartition(".")[2] == last for arg in given):
                return True
        return False


def _early_updates(unit: Unit) -> list[LoopCall]:
    """Updates on a way that has not asked the scaler for a step, behind a test of the loss."""
    found: dict[int, LoopCall] = {}
    for way in unit.ways:
        if not any(asks_for_finite(unit.source, test) for test in way.tests):
            continue
        for event in way.events:
            if event.kind in ("step", "unscale") and event.owner:
                break
            if event.kind == "update":
                found[id(event.node)] = event
                break
    return [*found.values()]


def _jumps_over(unit: Unit) -> Iterator[tuple[ast.stmt, bool]]:
    """`continue` behind a scaled backward pass, where the scaler has begun its step or the gradients are not finite."""
    seen: set[int] = set()
    for way in unit.ways:
        if way.ending != "continue" or way.at is None or id(way.at) in seen or not _is_open(way):
            continue
        begun = any(event.kind in ("unscale", "step") and event.owner for event in _since_update(way))
        if begun or any(asks_for_finite(unit.source, test) for test in way.tests):
            seen.add(id(way.at))
            yield way.at, begun


def _is_open(way: Way[LoopCall]) -> bool:
    """Whether a scaled backward pass waits for its update."""
    return any(event.kind == "backward" and event.owner for event in _since_update(way))


def _since_update(way: Way[LoopCall]) -> list[LoopCall]:
    updates = [place for place, event in enumerate(way.events) if event.kind == "update"]
    return list(way.events[updates[-1] + 1 if updates else 0 :])
