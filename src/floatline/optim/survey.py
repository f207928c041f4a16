"""What a backend is given, what it finds in the gradients, and what is decided; nothing waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from floatline.errors import OptimizerError
from floatline.numerics.moving import send

BLOCK = 256  # elements that share one scale of an 8-bit state


@dataclass(slots=True)
class Entry:
    """One parameter with its gradient and its state, all of them on this process and this device.

    Backends change weight and state in place and never put another tensor in their place: for a sharded
    parameter these are the local tensors of DTensors that live elsewhere.

    Args:
        weight: The parameter, float32, float16 or bfloat16; the local shard of a DTensor.
        grad: Its gradient, of any floating dtype; the local shard of a DTensor.
        state: "step" (float32, one number), the rule's states, "remainder" (int16) or "compensation" for a
            16-bit weight, and "<name>_scale" (float32, one for each 256 elements) for an 8-bit state. States have
            the weight's shape and, where the weight is dense in memory, its strides.
        group: The parameter group, with its hyperparameters.
        stream: Number of the parameter in the optimizer; part of the key of every random choice.
        start: Index of the weight's first element in the whole tensor; 0 unless the weight is a shard.
        sharded: The DTensor that the weight is this process's part of; None where the weight is whole.
    """

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    group: dict[str, Any]
    stream: int
    start: int
    sharded: Tensor | None = None


def state_stream(stream: int) -> int:
    """The random stream of a parameter's states: apart from the weight's own, and from every other parameter's.

    Args:
        stream: The parameter's number, below 2**28.
    """
    return stream + (1 << 28)


def fill(entries: list[Entry]) -> None:
    """Give the entries their gradients, where the list holds these apart."""
    own = getattr(entries, "fill", None)
    if own is not None:
        own()


def by_device(entries: list[Entry]) -> dict[torch.device, list[Entry]]:
    """The entries of each device, in their order; the list itself where there is only one device."""
    places = {entry.weight.device for entry in entries}
    if len(places) == 1:
        return {places.pop(): entries}
    fill(entries)
    found: dict[torch.device, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.weight.device, []).append(entry)
    return found


@dataclass(frozen=True)
class Survey:
    """Sums over the gradients as they are, scaled or not, in the order of the parameters that have one.

    Args:
        sums: Sum of squares of each gradient; float32. inf or NaN where the gradient holds one.
        nonfinite: How many inf and NaN each gradient holds; int32.
        parts: Where some gradients are sharded and this is what one process found: into how many parts each is cut;
            float32. None where it is what all processes found.
        sum_up: Gives what all processes found; every process must call it. None where this is that.
    """

    sums: Tensor
    nonfinite: Tensor
    parts: Tensor | None = None
    sum_up: Callable[[], Survey] | None = None

    @property
    def whole(self) -> Survey:
        """What all processes found; talks to them where that is not known yet."""
        return self if self.sum_up is None else self.sum_up()

    @property
    def norms(self) -> Tensor:
        """Norm of each gradient."""
        return self.sums.sqrt()

    @property
    def total(self) -> Tensor:
        """Sum of squares of all gradients together; inf or NaN where one holds inf or NaN, or where it overflows."""
        return self.sums.sum()

    @property
    def norm(self) -> Tensor:
        """Norm of all gradients together."""
        return self.total.sqrt()


@dataclass(frozen=True)
class Decision:
    """What happens to a step: tensors without dimensions, on the device.

    Args:
        applied: Whether the step is made; bool.
        factor: What gradients are multiplied by: clip coefficient / scale; float32. Without meaning where the
            step is not made.
        norm: Norm of all gradients, unscaled and before clipping; None where no survey was made.
    """

    applied: Tensor
    factor: Tensor
    norm: Tensor | None

    def to(self, device: torch.device) -> Decision:
        """The same decision on another device."""
        norm = None if self.norm is None else send(self.norm, device)
        return Decision(send(self.applied, device), send(self.factor, device), norm)


def merge(surveys: list[Survey], order: list[int]) -> Survey:
    """The surveys of several devices as one, on the first of them.

    Args:
        surveys: One for each device.
        order: For each gradient, where it stands when the surveys are put one after the other.
    """
    home = surveys[0].sums.device
    index = torch.tensor(order, device=home)
    sums = torch.cat([send(survey.sums, home) for survey in surveys])
    counts = torch.cat([send(survey.nonfinite, home) for survey in surveys])
    return Survey(sums[index], counts[index])


def decide(
    survey: Survey | None,
    *,
    scale: float | Tensor | None = None,
    clip_norm: float | Tensor | None = None,
    skip: bool | Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Decision:
    """Turn a survey into a decision, without reading a number on the host.

    Numerics:
        norm = sqrt(sum of squares) / scale. The step is made where the norm is finite, no gradient holds inf or
        NaN, and `skip` is false. Gradients are multiplied by min(1, clip_norm / (norm + 1e-6)) / scale: the
        coefficient of torch.nn.utils.clip_grad_norm_. Checked by tests/optim/test_survey.py.

    Args:
        survey: What was found; None trusts `skip` alone, and cannot clip.
        scale: What the loss was multiplied by.
        clip_norm: Largest norm that is let through, in unscaled gradients.
        skip: True: do not make the step, whatever was found.
        device: Where the decision is made if there is no survey.
    """
    device = device if survey is None else survey.sums.device
    scale = _scalar(1.0 if scale is None else scale, device)
    applied = torch.ones((), dtype=torch.bool, device=device)
    factor = scale.reciprocal()
    norm = None
    if survey is not None:
        norm = survey.norm / scale
        applied = norm.isfinite() & ~survey.nonfinite.any()
        if clip_norm is not None:
            factor = (_scalar(clip_norm, device) / (norm + 1e-6)).clamp(max=1.0) / scale
    if skip is not None:
        applied = applied & ~torch.as_tensor(skip, device=device).to(torch.bool).reshape(())
    return Decision(applied, factor, norm)


def check_options(*, scale: float | Tensor | None, clip_norm: float | Tensor | None) -> None:
    """Refuse a scale or a clip norm that would turn gradients round or make nothing of them.

    Tensors are not looked at: they may be on a device that is still computing them.
    """
    if scale is not None and not isinstance(scale, Tensor) and not 0 < scale < math.inf:
        raise OptimizerError(f"scale is {scale}. Use a finite number above 0, or None.")
    # An infinite clip norm clips nothing and still gives the norm: torch's users know it so.
    if clip_norm is not None and not isinstance(clip_norm, Tensor) and not clip_norm > 0:
        raise OptimizerError(f"clip_norm is {clip_norm}. Use a number above 0, or None.")


def _scalar(value: float | Tensor, device: torch.device | str) -> Tensor:
    if isinstance(value, Tensor):
        return send(value.detach(), torch.device(device), torch.float32).reshape(())
    # full, unlike as_tensor, copies nothing from the host.
    return torch.full((), value, dtype=torch.float32, device=device)
