"""Replay and compare_steps: what a replayed step gave, and how far two of them agree. Numbers only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from floatline.probe.trace.trace import Trace


@dataclass(frozen=True)
class Replay:
    """What one replay of a step gave.

    Args:
        precision: What it was computed in.
        scale: The loss scale.
        islands: Modules that were computed in FP32 on request.
        loss: The mean over the batches, unscaled.
        finite: Whether the loss and all gradients are finite.
        raw: Gradients by parameter as backward left them: scaled, summed over the batches.
        unit: What `raw` is a multiple of: scale and number of batches.
        before: Weights before the update; None where none was asked for.
        after: Weights and buffers after it.
        trace: Every operation, where it was asked for.
        seconds: How long it took.
        compute_seconds: Of it, forward and backward alone, by the device's clock.
    """

    precision: str
    scale: float
    islands: tuple[str, ...]
    loss: float
    finite: bool
    raw: dict[str, Tensor]
    unit: float
    before: dict[str, Tensor] | None
    after: dict[str, Tensor] | None
    trace: Trace | None
    seconds: float
    compute_seconds: float

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the mean loss by parameter, unscaled, in float32."""
        return {name: grad.float() / self.unit for name, grad in self.raw.items()}

    @cached_property
    def gradient_norm(self) -> float:
        """Global norm of the gradients; NaN or inf where one holds such."""
        squares = [grad.double().square().sum() for grad in self.raw.values()]
        return math.sqrt(float(torch.stack(squares).sum())) / self.unit if squares else 0.0

    @cached_property
    def updates(self) -> dict[str, Tensor] | None:
        """What the optimizer's step added to each parameter, in float32; None where none was asked for."""
        if self.before is None or self.after is None:
            return None
        return {name: self.after[name].float() - before.float() for name, before in self.before.items()}


@dataclass(frozen=True)
class Agreement:
    """How far a gradient agrees with a reference.

    Args:
        cosine: Of the angle between them; NaN where one is 0 or not finite.
        norm_ratio: Norm of the one over that of the reference.
        lost: Elements that are 0 and are not in the reference.
        numel: Elements.
        largest_error: Largest difference, over the largest magnitude of the reference.
    """

    cosine: float
    norm_ratio: float
    lost: int
    numel: int
    largest_error: float

    @property
    def lost_share(self) -> float:
        """Elements that are 0 and are not in the reference, of all."""
        return self.lost / self.numel if self.numel else 0.0


@dataclass(frozen=True)
class StepComparison:
    """How far the gradients of two replays agree.

    Args:
        parameters: By name.
        whole: Of all of them, as one vector.
    """

    parameters: dict[str, Agreement]
    whole: Agreement

    @property
    def worst(self) -> tuple[str, Agreement] | None:
        """The parameter whose gradient agrees least: not comparable first, then by the angle."""
        if not self.parameters:
            return None
        name = min(self.parameters, key=lambda n: -2.0 if math.isnan(c := self.parameters[n].cosine) else c)
        return name, self.parameters[name]


def compare_steps(a: Replay, b: Replay) -> StepComparison:
    """Compare the unscaled gradients of a step with those of a reference, such as the same step in FP32.

    Numerics:
        Sums in float64. A parameter with a gradient in one of them only has zeros in the other. What is not finite
        makes cosine and error NaN. The largest error of two zeros is 0, and inf where only the reference is all 0.
        Checked by tests/probe/steps/test_replay.py.

    Args:
        a: The step.
        b: The reference.
    """
    names = list(dict.fromkeys([*b.raw, *a.raw]))
    rows = [_measure(a, b, name) for name in names]
    if not rows:
        return StepComparison({}, _agree([0.0] * 7))
    numbers = cast("list[list[float]]", torch.stack(rows).tolist())  # one read for all
    total = [sum(column, 0.0) for column in zip(*numbers, strict=True)]
    total[5], total[6] = max(row[5] for row in numbers), max(row[6] for row in numbers)
    if any(math.isnan(row[5]) for row in numbers):
        total[5] = math.nan
    return StepComparison({name: _agree(row) for name, row in zip(names, numbers, strict=True)}, _agree(total))


def _measure(a: Replay, b: Replay, name: str) -> Tensor:
    """Product, squares, lost zeros, elements, largest difference and largest of the reference, on the device."""
    one, other = a.raw.get(name), b.raw.get(name)
    given = one if one is not None else other
    if given is None:
        raise AssertionError  # the name is of one of them
    x = torch.zeros_like(given, dtype=torch.float64) if one is None else one.double() / a.unit
    y = torch.zeros_like(given, dtype=torch.float64) if other is None else other.double() / b.unit
    y = y.to(x.device)
    lost = ((x == 0) & (y != 0)).sum()
    tops = ((x - y).abs().amax(), y.abs().amax()) if x.numel() else (x.sum(), y.sum())
    parts = ((x * y).sum(), x.square().sum(), y.square().sum(), lost, x.new_tensor(x.numel()), *tops)
    return torch.stack([part.to("cpu" if x.device.type == "cpu" else x.device, torch.float64) for part in parts])


def _agree(row: list[float]) -> Agreement:
    product, own, theirs, lost, numel, difference, top = row
    sizes = math.sqrt(own) * math.sqrt(theirs) if own >= 0 and theirs >= 0 else math.nan
    cosine = product / sizes if sizes > 0 and math.isfinite(sizes) else math.nan
    ratio = math.sqrt(own) / math.sqrt(theirs) if theirs > 0 and own >= 0 else (math.inf if own > 0 else math.nan)
    error = difference / top if top > 0 else (0.0 if difference == 0 else math.inf)
    if not math.isfinite(own) or not math.isfinite(theirs):
        error = math.nan
    return Agreement(cosine, ratio, int(lost), int(numel), error)
