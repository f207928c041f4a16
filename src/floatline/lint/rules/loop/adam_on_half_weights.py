"""FL216: an optimizer of torch whose eps and state are zero in FP16."""

from __future__ import annotations

import ast

from floatline.causes.underflow import OPTIMIZER_STATE_UNDERFLOW
from floatline.lint.reading.half_models import find_half_models
from floatline.lint.reading.loop import find_units
from floatline.lint.reading.reaching import DEFAULT_EPS, ZERO_IN_FP16
from floatline.lint.rule import Rule


class AdamOnHalfWeights(Rule):
    """Flags `torch.optim.Adam` and its family over a model in FP16, with an eps that FP16 rounds to zero.

    ## Why is this bad?
    torch keeps the optimizer's state in the dtype of the parameter. In FP16 an eps of 1e-8 is zero, and the second
    moment of Adam is zero for gradients below 5.4e-3 after one step: 0 / 0 is NaN, and a small gradient gives inf.
    """

    code = "FL216"
    name = "adam-on-half-weights"
    cause = OPTIMIZER_STATE_UNDERFLOW
    message = "its state is FP16 like the weights: eps is 0 there, and a zero gradient gives 0 / 0"
    advice = "floatline.optim.AdamW; or FP32 weights under torch.autocast, with a GradScaler"
    words = (".backward(",)
    good = (
        """
import torch
model = make()
optimizer = torch.optim.Adam(model.parameters())
for x, y in batches:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
model = make().half()
optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
for x, y in batches:
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
from apex.optimizers import FusedAdam
model = make()
if args.fp16:
    model.half()
if args.fp16:
    optimizer = FusedAdam(model.parameters())
else:
    optimizer = torch.optim.Adam(model.parameters())
for x, y in batches:
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
teacher = make().half()
optimizer = torch.optim.Adam(student.parameters())
for x, y in batches:
    loss_fn(student(x), teacher(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
model = make().half()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for x, y in batches:
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("m", dtype=torch.float16)
model = get_peft_model(model, lora)
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    )
    bad = (
        """
import torch
model = make().half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in batches:
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch as t
from torch.optim import AdamW as Optimizer
import floatline

def train(model):
    model.to(device="cuda", dtype=t.float16)
    optimizer = Optimizer(model.parameters(), lr=1e-3, eps=1e-8)
    for x, y in batches:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        """
import torch
model = make().half().cuda()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for x, y in batches:
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("m", dtype=torch.float16)
model = get_peft_model(model, lora, autocast_adapter_dtype=False)
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
from peft import get_peft_model
model = get_peft_model(make().half(), lora, autocast_adapter_dtype=False).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    )

    def visit_Module(self, node: ast.Module) -> None:  # noqa: N802
        """Optimizers over FP16 models that step by themselves."""
        del node
        alone: set[str] = set()
        for unit in find_units(self.source):
            alone |= {event.target for event in unit.events if event.kind == "step" and not event.owner}
        if not alone:
            return
        for model in find_half_models(self.source):
            name = self.source.call_name(model.call)
            if model.optimizer not in alone or name not in DEFAULT_EPS or self._eps(model.call, name) > ZERO_IN_FP16:
                continue
            since = f"{model.name} is FP16 since line {model.cast.lineno}"
            seen = f"{since}: {name}'s eps is 0 there, and a zero gradient gives 0 / 0"
            self.report(model.call, seen=seen)

    def _eps(self, call: ast.Call, name: str) -> float:
        """The eps of an optimizer; inf where it is not shown, or where its kernel computes in FP32."""
        words = {word.arg: word.value for word in call.keywords}
        if "fused" in words or None in words or len(call.args) > 3:
            return float("inf")
        if "eps" not in words:
            return DEFAULT_EPS[name]
        number = self.source.number(words["eps"])
        return float("inf") if number is None else number
