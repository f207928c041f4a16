"""Folk remedies by name, for those who expect them: what each one did when it was measured, and what to do instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from floatline import optim
from floatline.errors import GuardError, suggest
from floatline.guard.policy import Policy
from floatline.plans import Scaling

MEASURED_ON = "validation loss against FP32 with the same seed, small GPT, 400 steps"


class RemedyWarning(UserWarning):
    """A remedy is used that did harm when it was measured."""


@dataclass(frozen=True)
class Remedy:
    """Something that people do against NaN, as data. None of them is a default anywhere.

    Args:
        name: Short name.
        what: What it does.
        harm: What it did when it was measured.
        instead: What to do, and what that did.
        apply: Does it; None where there is no way to do it with floatline.
    """

    name: str
    what: str
    harm: str
    instead: str
    apply: Callable[..., Any] | None = None


class _Unmasked(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, changed: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Give the value."""
        del ctx, changed
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Send the gradient to the changed one."""
        del ctx
        return None, grad


def _unmasked(value: Tensor, changed: Tensor) -> Tensor:
    return _Unmasked.apply(value.detach(), changed)  # pyright: ignore[reportUnknownVariableType]


def clamp_loss(loss: Tensor, low: float = 0.0, high: float = 6.0) -> Tensor:
    """A loss, or losses of tokens, with the gradient that clamping gives: zero outside of low and high.

    Numerics:
        The value stays as it is, so that what is recorded is the loss and not the bound.
    """
    return _unmasked(loss, loss.clamp(low, high))


def clamp_logits(logits: Tensor, bound: float = 5.0) -> Tensor:
    """Logits between -bound and bound; the gradient is zero outside."""
    return logits.clamp(-bound, bound)


def divide_loss(loss: Tensor, by: float = 64.0) -> Tensor:
    """A loss with gradients divided by a number, against overflow; the value stays as it is."""
    return _unmasked(loss, loss / by)


def skip_norm_above(limit: float = 2.0) -> Policy:
    """A policy that skips every step whose unscaled gradient norm is above the limit; for `Guard(policy=...)`."""
    return Policy(skip_norm_above=limit)


def start_at_2_32() -> Scaling:
    """A plan's scaling that starts at 2^32, with hysteresis 2. The cap is raised to it: 2^24 is the usual one."""
    return Scaling(init_scale=2.0**32, cap=2.0**32, hysteresis=2)


def clip_before_unscale(parameters: Iterable[Tensor], max_norm: float = 1.0) -> Tensor:
    """Clip gradients that still hold the loss scale; gives the norm before."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def nearest_adamw(params: Any, lr: float = 1e-3) -> optim.AdamW:
    """AdamW that rounds 16-bit weights to nearest and keeps nothing of what was rounded off."""
    return optim.AdamW(params, lr=lr, update="nearest")


def fp16_adam(params: Any, lr: float = 1e-3, eps: float = 1e-4) -> torch.optim.Adam:
    """torch's Adam on FP16 weights, with FP16 moments and a large eps."""
    return torch.optim.Adam(params, lr=lr, eps=eps)


_ALL = (
    Remedy(
        name="clamp-loss",
        what="loss.clamp(0, 6)",
        harm="+67 % on the mean: above 6 its gradient is zero, from step 0 on. +162 % on the loss of each token",
        instead="nothing: the guard skips what is not finite, and records the loss as it was",
        apply=clamp_loss,
    ),
    Remedy(
        name="clamp-logits",
        what="logits.clamp(-5, 5)",
        harm="+0.7 % with 512 tokens; with 50,257 the loss cannot fall below 1.19 nats",
        instead="logits and cross-entropy in FP32, and a z-loss",
        apply=clamp_logits,
    ),
    Remedy(
        name="fp16-adam",
        what="torch.optim.Adam on FP16 weights with a larger eps",
        harm="NaN with eps 1e-8, +21 % with 1e-6, +0.8 % with 1e-4",
        instead="floatline.optim.AdamW, whose master weights are exact: -0.03 %",
        apply=fp16_adam,
    ),
    Remedy(
        name="fp16-moments",
        what="Adam's moments in FP16",
        harm="+23 %, or NaN",
        instead="FP32 moments beside FP16 weights: +0.07 %, stochastic -0.06 %, Kahan -0.01 %",
    ),
    Remedy(
        name="nearest-weights",
        what="BF16 weights that are rounded to nearest",
        harm="+5.4 %",
        instead='floatline.optim.AdamW(update="stochastic") 0.00 %, "kahan" -0.04 %',
        apply=nearest_adamw,
    ),
    Remedy(
        name="divide-loss",
        what="loss / 64 or loss / 1024 and no scaler, against overflow",
        harm="+1 % with 64, +87 % with 1024: small gradients become zero",
        instead="a loss scale that moves: 0.00 %",
        apply=divide_loss,
    ),
    Remedy(
        name="skip-norm-above",
        what="skip the step where the gradient norm is above a fixed number",
        harm=(
            "at 2: 0 % on a clean run, +32 % after 20 garbage batches, frozen after a bit flip, and on scaled norms it "
            "skips everything; at 1: skips 25 % of the steps, +4.9 %"
        ),
        instead="the guard's outlier score, and clip_norm=1.0",
        apply=skip_norm_above,
    ),
    Remedy(
        name="init-scale-2^32",
        what="start at a loss scale of 2^32, with hysteresis 2",
        harm="+0.34 %; +5.7 % in a fine-tuning of 60 steps: steps are skipped until the scale has fallen",
        instead="2^16",
        apply=start_at_2_32,
    ),
    Remedy(
        name="clip-before-unscale",
        what="clip gradients while they hold the loss scale",
        harm="+2.7 %: at a scale of 65,536 the bound is 1/65,536 of what was meant",
        instead="unscale, then clip, as the guard does",
        apply=clip_before_unscale,
    ),
)
REMEDIES: dict[str, Remedy] = {remedy.name: remedy for remedy in _ALL}


def find_remedy(name: str) -> Remedy:
    """The remedy of that name; says nothing."""
    if name not in REMEDIES:
        raise GuardError(f"Remedy {name!r} is not known. {suggest(str(name), REMEDIES)}")
    return REMEDIES[name]


def use_remedy(name: str) -> Callable[..., Any]:
    """Warn, with what was measured, and give the function that does it.

    Args:
        name: A key of REMEDIES.

    Raises:
        GuardError: There is none of that name, or floatline has no way to do it.
    """
    remedy = find_remedy(name)
    if remedy.apply is None:
        raise GuardError(f"Remedy {name!r} is not offered: {remedy.harm}. Use {remedy.instead}.")
    message = f"{name} ({remedy.what}): {remedy.harm} ({MEASURED_ON}). Instead: {remedy.instead}."
    warnings.warn(message, RemedyWarning, stacklevel=2)
    return remedy.apply
