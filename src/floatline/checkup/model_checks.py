"""What a model and its optimizer would do under a plan, told without training."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.optim import Optimizer

from floatline.causes import find_cause, find_named_causes
from floatline.checkup.choose import Note
from floatline.findings import Finding
from floatline.formats import FP16
from floatline.plans import Plan
from floatline.precision.dtypes import find_overflow, find_parameters, floating_parameters


def find_half_parameters(model: nn.Module, plan: Plan) -> list[Finding]:
    """FP16 parameters that are trained with a scaler, which refuses their gradients."""
    halves = find_parameters(model, torch.float16, trainable_only=True)
    if not halves or not plan.mixed or plan.scaling is None:
        return []
    trained = sum(1 for _, parameter in floating_parameters(model) if parameter.requires_grad)
    return [
        Finding(
            cause=find_cause("fp16-params-with-scaler"),
            module=next(iter(halves)),
            seen=f"{len(halves)} of {trained} trained parameters are FP16: {list_names(halves)}",
            fix="for p in model.parameters(): p.data = p.data.float() if p.requires_grad else p.data",
            op="torch.amp.GradScaler.unscale_",
        )
    ]


def find_vanishing_eps(model: nn.Module, optimizer: Optimizer, plan: Plan) -> list[Finding]:
    """An eps that is 0 in FP16, in an optimizer that computes in the dtype of the weights.

    Numerics:
        fp16 rounds every eps up to 2.98e-08 to 0. torch's fused kernels compute in FP32 and keep it.
    """
    if plan.weights != "fp16" or not type(optimizer).__module__.startswith("torch.optim"):
        return []
    lost = {
        float(group["eps"])
        for group in optimizer.param_groups
        if isinstance(group.get("eps"), float) and not group.get("fused") and FP16.round(group["eps"]) == 0
    }
    if not any(lost):
        return []
    name = type(optimizer).__name__
    first = next(name for name, parameter in floating_parameters(model) if parameter.requires_grad)
    return [
        Finding(
            cause=find_cause("optimizer-state-underflow"),
            module=first,
            seen=f"{name} has eps={max(lost):g}, which is 0 in fp16 (up to 2.98e-08 is), and fp16 weights",
            fix="plan fp16-mixed, or an optimizer with an FP32 master",
            op=f"torch.optim.{name}.step",
        )
    ]


def find_forward_failure(problem: str, plan: Plan) -> list[Finding]:
    """The cause that an exception of the first forward pass names, if it names one."""
    causes = find_named_causes(problem) if problem else []
    # A kernel that is missing on the CPU may exist on the device.
    causes = [cause for cause in causes if cause.id != "unsupported-half-op"]
    if not causes:
        return []
    return [
        Finding(
            cause=causes[0],
            seen=f"the first forward pass in {plan.name} raised {problem}",
            fix=causes[0].advice,
        )
    ]


def note_stored_weights(model: nn.Module, plan: Plan) -> list[Note]:
    """What the dtype that weights were stored in means for the plan."""
    notes: list[Note] = []
    stored_bf16 = find_parameters(model, torch.bfloat16)
    if plan.compute == "fp16":
        notes += _note_range(model, stored_bf16)
    if plan.mixed and any(p.requires_grad for p in stored_bf16.values()):
        notes.append(
            Note(
                "precision",
                "Trained weights are stored in BF16: load them in FP32, or updates below |w|/512 are lost.",
            )
        )
    if plan.weights == "bf16":
        notes.append(
            Note(
                "precision",
                "BF16 weights lose every update below |w|/512 unless the optimizer rounds stochastically or "
                "keeps the dropped bits; torch's own optimizers do neither.",
            )
        )
    if plan.weights == "fp16" and plan.scaling is not None:
        notes.append(
            Note(
                "precision",
                "torch.amp.GradScaler refuses FP16 gradients; plan fp16-true needs a scaler that takes them.",
            )
        )
    return notes


def _note_range(model: nn.Module, stored_bf16: dict[str, nn.Parameter]) -> list[Note]:
    too_large = find_overflow(model, "fp16")
    if too_large:
        text = (
            f"Weights beyond FP16's 65504, which become infinite in it: {sum(too_large.values()):,}, "
            f"in {list_names(too_large)}. Run this model in BF16 or FP32."
        )
        return [Note("precision", text)]
    if stored_bf16:
        text = (
            f"{len(stored_bf16)} parameters are stored in BF16. All weights fit FP16's range; activations "
            "that were trained with BF16's range may not."
        )
        return [Note("precision", text)]
    return []


def list_names(names: Collection[str]) -> str:
    """The first three of some names, and how many more there are."""
    shown = list(names)[:3]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
