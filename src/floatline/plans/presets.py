"""The plans that have a name, and finding one by name or file. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from floatline.errors import PlanError, suggest
from floatline.plans.plan import Clip, Plan, Scaling

_FP32_WEIGHTS = "FP32 weights take every update, however small, and are their own master copy."
_SEARCHED_SCALE = (
    "fp16 rounds gradients up to 2.98e-08 to zero; the scale starts at 65536, doubles after 1,000 good "
    "steps, halves on overflow, and stays between 1 and 2**24."
)
_NO_SCALE = "bf16 reaches as far down as fp32, so gradients need no scale."
_FP16_MIXED = {
    "weights": _FP32_WEIGHTS,
    "compute": "fp16 runs on tensor cores since sm_70 and keeps three mantissa bits more than bf16.",
    "scaling": _SEARCHED_SCALE,
}

_FP32 = Plan(
    name="fp32",
    weights="fp32",
    compute="fp32",
    reasons={
        "weights": "The reference that every other plan is compared with.",
        "compute": "FP32 everywhere; whether matrix products use TF32 is torch's setting, not the plan's.",
        "scaling": "FP32 gradients need no scale.",
    },
)
_MIXED = Plan(name="fp16-mixed", weights="fp32", compute="fp16", scaling=Scaling(), reasons=_FP16_MIXED)
_BF16_MIXED = Plan(
    name="bf16-mixed",
    weights="fp32",
    compute="bf16",
    reasons={
        "weights": _FP32_WEIGHTS,
        "compute": "bf16 has the range of fp32, so nothing overflows that did not before.",
        "scaling": _NO_SCALE,
    },
)
_FP16_TRUE = Plan(
    name="fp16-true",
    weights="fp16",
    compute="fp16",
    scaling=Scaling(),
    reasons={
        "weights": "Half the bytes; needs an optimizer that keeps the bits which fp16 drops.",
        "compute": "Weights and activations share one format, so nothing is cast.",
        "scaling": _SEARCHED_SCALE + " torch's GradScaler refuses fp16 gradients.",
    },
)
_BF16_TRUE = Plan(
    name="bf16-true",
    weights="bf16",
    compute="bf16",
    reasons={
        "weights": "Half the bytes; plain rounding loses every update below |w|/512, so the optimizer "
        "must keep the dropped bits or round stochastically.",
        "compute": "Weights and activations share one format, so nothing is cast.",
        "scaling": _NO_SCALE,
    },
)
_SAFE = Plan(
    name="safe",
    weights="fp32",
    compute="fp16",
    scaling=Scaling(),
    clip=Clip(max_norm=5.0),
    accumulate=2,
    reasons={
        **_FP16_MIXED,
        "clip": "A loose bound: only steps whose norm is above 5 are shortened.",
        "accumulate": "Two batches an update halve the variance of the gradient.",
    },
)
_BALANCED = Plan(
    name="balanced",
    weights="fp32",
    compute="fp16",
    scaling=Scaling(),
    clip=Clip(max_norm=0.5),
    reasons={
        **_FP16_MIXED,
        "clip": "A tight bound, for fine-tuning and distillation: weights stay near their start.",
        "accumulate": "Every batch is an update.",
    },
)
_ULTRA_CONSERVATIVE = Plan(
    name="ultra-conservative",
    weights="fp32",
    compute="fp16",
    scaling=Scaling(growth_interval=5000),
    clip=Clip(max_norm=0.5),
    accumulate=4,
    reasons={
        **_FP16_MIXED,
        "scaling": "The scale tries to grow every 5,000 good steps instead of 1,000: at its ceiling each try "
        "costs one skipped step, so at most 0.02 % of steps are lost to the search instead of 0.1 %.",
        "clip": "A tight bound, for fine-tuning and distillation: weights stay near their start.",
        "accumulate": "Four batches an update: a quarter of the variance, for runs with a batch of one.",
    },
)

_COMPACT = Plan(
    name="compact",
    weights="bf16",
    compute="bf16",
    update="stochastic",
    states="int8",
    reasons={
        "weights": "Half the bytes, and with these updates nothing beside them.",
        "compute": "Weights and activations share one format, so nothing is cast.",
        "scaling": _NO_SCALE,
        "update": "A weight is rounded up or down at random, right on average, so small updates are not lost.",
        "states": "Both moments in 8 bits with a scale for each 256 elements: 2.03 bytes instead of 8.",
    },
)

PLANS: dict[str, Plan] = {
    plan.name: plan
    for plan in (
        _FP32,
        _MIXED,
        _BF16_MIXED,
        _FP16_TRUE,
        _BF16_TRUE,
        _SAFE,
        _BALANCED,
        _ULTRA_CONSERVATIVE,
        _COMPACT,
    )
}
# Lightning's names; "bf16-mixed" and "bf16-true" are the same in both.
ALIASES = {
    "32": "fp32",
    "32-true": "fp32",
    "16": "fp16-mixed",
    "16-mixed": "fp16-mixed",
    "16-true": "fp16-true",
    "bf16": "bf16-mixed",
}


def resolve_plan(plan: Plan | str | int | os.PathLike[str]) -> Plan:
    """The plan of that name ('fp16-mixed', Lightning's '16-mixed', a preset), or from that YAML file."""
    if isinstance(plan, Plan):
        return plan
    text = str(plan)
    name = text.strip().lower()
    name = ALIASES.get(name, name)
    if name in PLANS:
        return PLANS[name].model_copy(deep=True)
    if name in ("64", "64-true", "fp64"):
        raise PlanError(f"Plan '{text}' is FP64, which floatline does not plan. Use 'fp32' as the reference.")
    path = Path(text)
    if isinstance(plan, os.PathLike) or path.suffix in (".yaml", ".yml") or path.exists():
        return Plan.load(path)
    raise PlanError(f"Plan '{text}' is not known. {suggest(name, PLANS)} A YAML file works too.")
