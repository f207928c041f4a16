"""Which plan to use on a device and for a model, and why; and Note, advice that is no finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from floatline.hardware import Hardware, detect_devices, find_hardware
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class PlanDecision:
    """An automatic choice and its reason."""

    value: Plan
    reason: str

    def __str__(self) -> str:
        """For people."""
        return f"{self.value}: {self.reason}"


def choose_plan(device: Hardware | str | None = None, *, model: nn.Module | None = None) -> PlanDecision:
    """The plan to start with on a device, and for a model where one is given.

    Args:
        device: What to train on: 'sm_75', 'T4', 'cpu'. None takes the best device of this machine.
        model: Its stored weights are held against FP16's range before FP16 is proposed.
    """
    if device is None:
        device = detect_devices().best.hardware
    hardware = find_hardware(device) if isinstance(device, str) else device
    name, reason = _fit_hardware(hardware)
    if model is not None:
        name, reason = _fit_model(name, reason, model)
    plan = resolve_plan(name)
    # The saved plan must say why, too.
    return PlanDecision(plan.model_copy(update={"reasons": {**plan.reasons, "compute": reason}}), reason)


def _fit_hardware(hardware: Hardware) -> tuple[str, str]:
    title, fp16, bf16 = hardware.title, hardware.fp16, hardware.bf16
    if bf16.level == "native":
        return "bf16-mixed", (
            f"{title} computes BF16 natively ({bf16.note}). BF16 has FP32's range, so nothing overflows "
            "that did not before, and no loss scale is needed."
        )
    if hardware.id == "gtx-16":
        return "fp32", f"{title}: half-precision convolutions are known to give NaN there. Prove FP16 first."
    if hardware.kind == "mps":
        return "fp16-mixed", f"{title} computes FP16 natively; BF16 is {bf16}."
    if fp16.matrix_units:
        return "fp16-mixed", (
            f"{title} has FP16 {fp16.note}. BF16 is {bf16.level} {bf16.note}. FP16 needs the loss scale."
        )
    if fp16.level == "native":
        return "fp16-mixed", (f"{title} has FP16 at {fp16.note}, and BF16 is only {bf16.level}. {hardware.note}")
    if hardware.kind == "cpu":
        return "fp32", (
            f"{title}: torch multiplies no 16-bit matrices faster than FP32 there. "
            "To study FP16 numerics on it, use HalfOnCPU of floatline.numerics.half_on_cpu."
        )
    return "fp32", f"{title}: FP16 is {fp16}. {hardware.note}".rstrip()


def _fit_model(name: str, reason: str, model: nn.Module) -> tuple[str, str]:
    import torch

    from floatline.precision.dtypes import find_overflow, find_parameters

    halves = find_parameters(model, torch.float16, trainable_only=True)
    if halves and name.endswith("-mixed"):
        reason += f" {len(halves)} trainable parameters are FP16: cast them to FP32 for this plan."
    if name != "fp16-mixed":
        return name, reason
    too_large = find_overflow(model, "fp16")
    if too_large:
        worst = max(too_large, key=lambda parameter: too_large[parameter])
        return "fp32", (
            f"Weights that FP16 would make infinite: {sum(too_large.values()):,}, most in {worst}. "
            f"Without them: {reason}"
        )
    if find_parameters(model, torch.bfloat16):
        reason += (
            " The weights are stored in BF16; all of them fit FP16's range, but activations trained in BF16 may not."
        )
    return name, reason


@dataclass(frozen=True)
class Note:
    """One thing to know.

    Args:
        topic: What it is about.
        text: One or two sentences.
    """

    topic: Literal["setup", "precision", "memory", "speed"]
    text: str
