"""FL215: FP16 parameters, trained with a GradScaler."""

from __future__ import annotations

import ast

from floatline.causes.scaler import FP16_PARAMS_WITH_SCALER
from floatline.lint.reading.autocast_regions import is_on
from floatline.lint.reading.half_models import HalfModel, find_half_models
from floatline.lint.reading.loop import find_units, read_training
from floatline.lint.rule import Bad, Rule


class HalfWeightsWithScaler(Rule):
    """Flags an optimizer over a model in FP16 (`model.half()`) that a GradScaler steps.

    ## Why is this bad?
    A gradient has the dtype of its parameter, and GradScaler refuses FP16 gradients: the first step raises "Attempting
    to unscale FP16 gradients.". Autocast wants FP32 parameters.

    ## Fix safety
    Unsafe: it changes what is kept in memory. Where a part is frozen and autocast is used, the trainable parameters
    become FP32 before the optimizer is made. Else nothing is changed.
    """

    code = "FL215"
    name = "half-weights-with-scaler"
    cause = FP16_PARAMS_WITH_SCALER
    message = "the trained parameters are FP16, and GradScaler raises 'Attempting to unscale FP16 gradients.'"
    advice = (
        "cast what is trained to FP32 before the optimizer is made; or floatline.optim.AdamW with floatline.LossScaler"
    )
    fix_safety = "unsafe"
    words = (".backward(",)
    good = (
        """
import torch
model = make().cuda()
teacher = make().half()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), teacher(x))).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
model = make().half()
for p in model.parameters():
    if p.requires_grad:
        p.data = p.data.float()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
from peft import get_peft_model
from transformers import AutoModel
model = AutoModel.from_pretrained("base", torch_dtype=torch.float16)
model = get_peft_model(model, config)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch
model = make()
if args.pure_half:
    model.half()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    )
    bad = (
        Bad(
            """
import torch
model = make().half()
model.base.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
            fixed="""
import torch
model = make().half()
model.base.requires_grad_(False)
for parameter in model.parameters():
    if parameter.requires_grad:
        parameter.data = parameter.data.float()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        ),
        """
import torch
from torch import optim
from torch.amp import GradScaler as Scaler

def train(model, batches):
    model.half()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = Scaler("cuda")
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x.half()), y)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
        """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("base", torch_dtype=torch.float16).cuda()
optimizer = torch.optim.Adagrad(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for batch in batches:
    scaler.scale(model(**batch).loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    )

    def visit_Module(self, node: ast.Module) -> None:  # noqa: N802
        """Optimizers over FP16 models that a loop of the file steps through a scaler."""
        stepped: dict[str, str] = {}
        for unit in find_units(self.source):
            for event in unit.events:
                if event.kind == "step" and event.owner and not unit.training.is_off(event.owner):
                    stepped[event.target] = event.owner
        if not stepped:
            return
        scalers = read_training(self.source).scalers
        for optimizer, scaler in stepped.items():
            made = scalers.get(scaler)
            for model in find_half_models(self.source, made.known if made else {}):
                if model.optimizer == optimizer:
                    self._tell(model, node)

    def _tell(self, model: HalfModel, tree: ast.Module) -> None:
        since = f"{model.name} is FP16 since line {model.cast.lineno}"
        seen = f"{since}, and GradScaler raises 'Attempting to unscale FP16 gradients.'"
        if model.is_frozen_in_part and any(is_on(self.source, one) for one in ast.walk(tree)):
            self.report(model.call, seen=seen, fix="trainable-in-fp32")
            return
        self.report(model.call, seen=seen)
