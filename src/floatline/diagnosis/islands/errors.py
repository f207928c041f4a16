"""How near to FP32 a 16-bit step must be, how near it is, and what rounding alone does to it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from floatline.formats import find_format
from floatline.probe.steps.capture import Agreement, CapturedStep


@dataclass(frozen=True)
class Tolerance:
    """How near to FP32 a 16-bit step must be.

    Args:
        whole: Largest error of all gradients as one vector: norm of the difference over that of FP32's. 0.1 is a
            cosine of 0.995.
        parameter: Largest error of the gradient of one parameter.
        lost: Largest share of a parameter's gradient that is 0 and is not in FP32.
        noise: The first two grow to this multiple of the ordinary rounding noise of the step, where that is more;
            so does `lost`, to this multiple of what the median parameter loses without an island.
    """

    whole: float = 0.1
    parameter: float = 0.5
    lost: float = 0.05
    noise: float = 4.0


@dataclass(frozen=True)
class ReplayOutcome:
    """One replay of a step, held against FP32.

    Args:
        passes: Whether it is finite and within the tolerance.
        finite: Whether loss and gradients are finite.
        loss: The loss.
        error: Of all gradients as one vector; NaN where one is not finite.
        scale: The loss scale of the replay.
        why: What is wrong, with the number; '' where it passes.
    """

    passes: bool
    finite: bool
    loss: float
    error: float
    scale: float
    why: str


def error_of(match: Agreement) -> float:
    """Norm of the difference over that of the reference; 0 where the reference is 0 and says nothing."""
    cosine, ratio = match.cosine, match.norm_ratio
    if math.isinf(ratio) or (math.isnan(ratio) and not math.isnan(match.largest_error)):
        return 0.0
    if ratio == 0:
        return 1.0
    return math.sqrt(max(0.0, ratio * ratio - 2 * ratio * cosine + 1)) if not math.isnan(cosine) else math.nan


def relative_error(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Norm of the difference over that of the reference, all tensors as one vector."""
    difference = sum(float((tensors[n] - r).double().square().sum()) for n, r in reference.items() if n in tensors)
    norm = sum(float(r.double().square().sum()) for r in reference.values())
    return math.sqrt(difference / norm) if norm else 0.0


@contextlib.contextmanager
def moved_weights(step: CapturedStep) -> Generator[None]:
    """The captured weights moved as much as rounding to the step's 16-bit format would."""
    captured = step.state.captured
    unit = find_format(step.plan.compute if step.plan.compute != "fp32" else "fp16").epsilon / 2
    step.state.captured = {name: _move(tensor, unit, seed) for seed, (name, tensor) in enumerate(captured.items())}
    try:
        yield
    finally:
        step.state.captured = captured


def _move(tensor: Tensor, unit: float, seed: int) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    dice = torch.Generator(tensor.device).manual_seed(seed)
    roll = torch.rand(tensor.shape, generator=dice, device=tensor.device, dtype=torch.float32)
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide * (1 + unit * (2 * roll - 1))
