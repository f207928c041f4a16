"""FL221: FP16 autocast, and a backward pass without a loss scale."""

from __future__ import annotations

import ast
import re

from floatline.causes.underflow import GRADIENT_UNDERFLOW
from floatline.lint.reading.autocast_regions import dtype_of, is_on
from floatline.lint.reading.loop import Unit
from floatline.lint.reading.loop_events import dotted
from floatline.lint.reading.source_tree import keyword
from floatline.lint.rules.loop import LoopRule

# Whatever scales may do so out of sight.
_SCALES = re.compile(r"scale|Accelerator|deepspeed|[Ff]abric|apex|manual_backward|[Ll]ightning", re.IGNORECASE)


class AutocastWithoutScaler(LoopRule):
    """Flags `loss.backward()` in a loop with FP16 autocast, in a file where nothing scales the loss.

    ## Why is this bad?
    Gradients of activations are FP16 there: 2.98e-8 and less is exactly zero, and below 6.1e-5 bits are lost. What lies
    behind them does not move. A loss scale of 65536 lifts them out of the zeros.
    """

    code = "FL221"
    name = "autocast-without-scaler"
    cause = GRADIENT_UNDERFLOW
    message = "gradients are FP16 here and the loss is not scaled: 2.98e-08 and less is zero"
    advice = 'scaler = torch.amp.GradScaler("cuda"); scaler.scale(loss).backward(); or dtype=torch.bfloat16'
    good = (
        """
import torch
for x, y in batches:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
for x, y in batches:
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        target = teacher(x)
    loss_fn(model(x), target).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
for x, y in batches:
    with torch.autocast(device, dtype=dtype, enabled=amp):
        loss = loss_fn(model(x), y)
    loss.backward()
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
from torch.cuda.amp import autocast as cast
def train(model, optimizer):
    for x, y in batches:
        with cast():
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        """
import torch
for x, y in batches:
    with torch.amp.autocast("cuda"):
        out = model(x)
        loss = loss_fn(out, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """Plain backward passes of what an FP16 region made."""
        if "autocast" not in self.source.text:
            return
        text = self.source.text.replace("scaled_dot_product", "")
        if _SCALES.search(text):
            return
        for event in unit.events:
            if event.kind == "backward" and self._is_made_in_half(unit, event.node):
                self.report(event.node)
                break

    def _is_made_in_half(self, unit: Unit, backward: ast.expr) -> bool:
        """Whether the name that backward is called on is assigned inside an FP16 region of the step."""
        loss = dotted(backward.func).removesuffix(".backward") if isinstance(backward, ast.Call) else ""
        for block in ast.walk(unit.node):
            if not isinstance(block, ast.With) or not any(self._is_half(item.context_expr) for item in block.items):
                continue
            for one in ast.walk(block):
                if isinstance(one, ast.Name) and one.id == loss and isinstance(one.ctx, ast.Store):
                    return True
        return False

    def _is_half(self, call: ast.expr) -> bool:
        """FP16, said so or by CUDA's default; a region that may be off does not count."""
        if not isinstance(call, ast.Call) or not is_on(self.source, call):
            return False
        enabled = keyword(call, "enabled")
        if enabled is not None and not (isinstance(enabled, ast.Constant) and enabled.value is True):
            return False
        dtype = dtype_of(self.source, call)
        device = call.args[0] if call.args else keyword(call, "device_type")
        is_cuda = isinstance(device, ast.Constant) and device.value == "cuda"
        return dtype == "float16" or (dtype == "default" and is_cuda)
