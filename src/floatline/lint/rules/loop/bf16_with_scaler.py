"""FL218: a loss scale for BF16."""

from __future__ import annotations

import ast

from floatline.lint.reading.autocast_regions import dtype_of, is_on
from floatline.lint.reading.loop import find_units, read_training
from floatline.lint.reading.source_tree import keyword
from floatline.lint.rule import Rule


class BF16WithScaler(Rule):
    """Flags a GradScaler that is on in a file whose autocast regions are all BF16.

    ## Why is this bad?
    BF16 has the exponents of FP32: no gradient is lost that FP32 would keep, and there is nothing to scale. The scaler
    only reads a flag from the GPU in every step, and the host waits for it.
    """

    code = "FL218"
    name = "bf16-with-scaler"
    title = "A loss scale for a format that needs none"
    message = (
        "every autocast here is BF16, which has the range of FP32: the scaler gains nothing and makes the host wait"
    )
    advice = "loss.backward(); optimizer.step() without a scaler; or GradScaler(enabled=…) with the dtype in the test"
    words = (".backward(",)
    good = (
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
dtype = torch.bfloat16
scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
for x, y in batches:
    with torch.autocast("cuda", dtype=dtype):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
dtype = torch.bfloat16 if modern else torch.float16
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    with torch.autocast("cuda", dtype=dtype):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    )
    bad = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
from torch import autocast as cast, bfloat16
from torch.cuda.amp import GradScaler as Scaler
scaler = Scaler()
for x, y in batches:
    with cast("cuda", bfloat16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
dtype = torch.bfloat16
scaler = torch.amp.GradScaler("cuda", enabled=True)
for x, y in batches:
    with torch.autocast("cuda", dtype=dtype):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    )

    def visit_Module(self, node: ast.Module) -> None:  # noqa: N802
        """Scalers that are used, in a file of BF16 regions."""
        used = {event.owner for unit in find_units(self.source) for event in unit.events if event.kind == "backward"}
        scalers = read_training(self.source).scalers if used - {""} else {}
        if not scalers:
            return
        regions = [call for call in ast.walk(node) if isinstance(call, ast.Call) and is_on(self.source, call)]
        if {dtype_of(self.source, call) for call in regions} != {"bfloat16"}:
            return
        flags = {ast.dump(flag) for call in regions if (flag := keyword(call, "enabled")) is not None}
        for name, made in scalers.items():
            enabled = keyword(made.call, "enabled")
            is_on_always = enabled is None or (isinstance(enabled, ast.Constant) and enabled.value is True)
            has_same_flag = enabled is not None and ast.dump(enabled) in flags
            if name in used and (has_same_flag or (is_on_always and not made.known.keys() - {"True"})):
                self.report(made.call)
