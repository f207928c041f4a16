"""How near to FP32 a 16-bit step must be, how near it is, and what rounding alone does to it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from floatline.formats import find_format
from floatline.probe.steps.capture import Agreement, CapturedStep, Replay, compare_steps
from floatline.probe.steps.captured_forward import CapturedForward


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
        most: The first two grow no further than this by it.
    """

    whole: float = 0.1
    parameter: float = 0.5
    lost: float = 0.05
    noise: float = 4.0
    most: float = math.inf


# How near to FP32 the outputs of a forward pass must be: 2 % of their size, or 8 times what it does to move the weights
# by half a unit in the last place: activations are rounded many times for each weight.
# Outputs may be 0 in 16 bits without harm, as small probabilities are.
OUTPUTS = Tolerance(whole=0.02, parameter=0.02, lost=math.inf, noise=8.0)


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


def measure_errors(step: CapturedStep, own: Replay, wide: Replay) -> dict[str, float]:
    """How far what a step ends in is from FP32's: gradients by parameter, and all under ''; or outputs by name."""
    if isinstance(step, CapturedForward):
        return {name: match.distance for name, match in step.match(own, wide).items()}
    match = compare_steps(own, wide)
    return {"": error_of(match.whole)} | {name: error_of(one) for name, one in match.parameters.items()}


def name_end(step: CapturedStep, name: str = "") -> str:
    """What a step ends in, in words: 'the gradient of head.weight', 'the output logits'."""
    if isinstance(step, CapturedForward):
        return "the output" if name in ("", "output") else f"the output {name}"
    return f"the gradient of {name}" if name else "the gradient"


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
