"""FL213: every training step waits for the GPU to read one number."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from floatline.lint.reading.loop import Unit
from floatline.lint.reading.tensors import ASKS_FOR_FINITE
from floatline.lint.rules.loop import LoopRule

_BRANCHES = (ast.If, ast.IfExp, ast.Try, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)


class SyncInHotLoop(LoopRule):
    """Flags `loss.item()`, `float(loss)` and `if torch.isnan(loss)` in every step of a loop on the GPU.

    ## Why is this bad?
    The host runs ahead of the GPU and queues its work. Reading a number makes it wait until everything queued is done,
    and the GPU then idles until the next kernels arrive. After `scaler.step`, which waits as well, a read is nearly
    free and is not flagged.
    """

    code = "FL213"
    name = "sync-in-hot-loop"
    only_if_selected = True
    title = "Every step waits for the GPU"
    message = "the host waits here for the GPU in every step, and the GPU then waits for the host"
    advice = (
        "keep the tensor (total += loss.detach()) and read it every 50 steps; floatline.Guard checks without waiting"
    )
    good = (
        """
import torch
model.cuda()
for i, (x, y) in enumerate(batches):
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if i % 50 == 0:
        print(loss.item())
""",
        """
import torch
model.cuda()
for x, y in batches:
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.detach()
print(total.item())
""",
        """
import torch
model.cpu()
for x, y in batches:
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()
""",
        """
import torch
def on_cpu(model, optimizer):
    for x, y in batches:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
def on_gpu(model):
    return model.cuda()
""",
        """
import torch
model.cuda()
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    total += loss.item()
""",
    )
    bad = (
        """
import torch
model.cuda()
for x, y in batches:
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()
""",
        """
import torch as t
model.to("cuda")
scaler = t.amp.GradScaler("cuda")
for x, y in batches:
    loss = loss_fn(model(x), y)
    if t.isnan(loss).any():
        raise ValueError("NaN")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
device = torch.device("cuda")
def train(model, optimizer):
    for x, y in batches:
        with torch.autocast("cuda"):
            loss = loss_fn(model(x.to(device)), y)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """The first such read of a loop; the others wait for nothing more."""
        if "cuda" not in self.source.text:  # on the CPU there is nothing to wait for
            return
        if unit.is_loop and self._is_on_gpu(unit):
            first = next(self._reads(unit), None)
            if first is not None:
                self.report(first)

    def _is_on_gpu(self, unit: Unit) -> bool:
        """Whether the function speaks of a device at all."""
        start, end = getattr(unit.function, "lineno", 1), getattr(unit.function, "end_lineno", len(self.source.lines))
        text = "\n".join(self.source.lines[start - 1 : end])
        return "cuda" in text or "device" in text

    def _reads(self, unit: Unit) -> Iterator[ast.expr]:
        losses = _losses(unit)
        waits = [event.node.lineno for event in unit.events if event.kind == "step" and event.owner]
        for call in unit.calls():
            if waits and call.lineno > min(waits):
                return
            if self._is_read(call, losses) and self._is_each_turn(call, unit):
                yield call

    def _is_read(self, call: ast.Call, losses: set[str]) -> bool:
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "item" and not call.args:
            return _root(function.value) in losses or self.source.is_tensor(function.value)
        if isinstance(function, ast.Name) and function.id == "float" and call.args:
            return _root(call.args[0]) in losses
        if self.source.call_name(call) in ASKS_FOR_FINITE and (operation := self.source.operation(call)) is not None:
            return _root(operation.operand) in losses and self._is_asked(call)
        return False

    def _is_asked(self, call: ast.Call) -> bool:
        """Whether a branch is taken on it."""
        inner: ast.AST = call
        for above in self.source.ancestors(call):
            if isinstance(above, (ast.If, ast.Assert)):
                return above.test is inner
            if isinstance(above, ast.stmt):
                return False
            inner = above
        return False

    def _is_each_turn(self, node: ast.AST, unit: Unit) -> bool:
        """Whether every turn of the loop comes by here."""
        inner = node
        for above in self.source.ancestors(node):
            if above is unit.node:
                return True
            if isinstance(above, _BRANCHES) and getattr(above, "test", None) is not inner:
                return False
            inner = above
        return False


def _losses(unit: Unit) -> set[str]:
    """The names that backward is called on, or scaled from."""
    found: set[str] = set()
    for event in unit.events:
        if event.kind != "backward" or not isinstance(event.node, ast.Call):
            continue
        value = event.node.func.value if isinstance(event.node.func, ast.Attribute) else None
        for one in ast.walk(value) if value is not None else ():
            if isinstance(one, ast.Call) and one.args and isinstance(one.args[0], ast.Name):
                found.add(one.args[0].id)
        if isinstance(value, ast.Name):
            found.add(value.id)
    return found


def _root(node: ast.expr) -> str:
    """`loss` of `loss.detach().mean()`."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
