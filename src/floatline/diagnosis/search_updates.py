"""Whether the optimizer's update agrees with FP32's too, or rounds to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from floatline.diagnosis.search_errors import relative_error
from floatline.diagnosis.search_judge import Judge
from floatline.probe.replay import Replay

# The error of an update from which it is spoken of: Adam's first updates are signs, which noise turns over.
_WRONG = 0.5
# The share of weights that stand still though they have a gradient.
_STUCK = 0.5


@dataclass(frozen=True)
class UpdateFault:
    """What the updates of the steps are like.

    Args:
        error: Norm of the difference to FP32's update over that of FP32's, the largest of the steps; None where
            the weights are 16-bit, and FP32 cannot make the same update.
        text: What is wrong; '' where nothing is.
    """

    error: float | None
    text: str


def find_update_fault(judge: Judge, modules: Sequence[str]) -> UpdateFault | None:
    """Make the update of every step with these modules in FP32; None where a step has no optimizer.

    Args:
        judge: Replays the steps.
        modules: The island.
    """
    errors: list[float] = []
    for i, step in enumerate(judge.steps):
        if step.optimizer is None:
            return None
        scale = judge.outcome(i, modules).scale
        made = judge.replay(i, islands=modules, scale=scale, update=True)
        if any(not bool(update.isfinite().all()) for update in (made.updates or {}).values()):
            return UpdateFault(
                None, "the update is not finite: that is the optimizer's own arithmetic, see floatline.optim"
            )
        if step.plan.weights != "fp32":
            share = _stuck_share(made)
            if share > _STUCK:
                text = f"the updates of {100 * share:.0f} % of the weights with a gradient round to nothing"
                return UpdateFault(None, f"{text}: that is the optimizer's rounding, see floatline.optim")
            continue
        error = relative_error(made.updates or {}, judge.replay(i, precision="fp32", update=True).updates or {})
        errors.append(error)
        if error > max(_WRONG, judge.tolerance.noise * judge.update_noise(i)):
            return UpdateFault(error, f"the gradients agree with FP32, and the update is {100 * error:.0f} % off")
    return UpdateFault(max(errors, default=None), "")


def _stuck_share(made: Replay) -> float:
    moved = stuck = 0
    for name, update in (made.updates or {}).items():
        gradient = made.raw.get(name)
        if gradient is None:
            continue
        has = gradient != 0
        moved += int(has.sum())
        stuck += int((has & (update.to(has.device) == 0) & torch.isfinite(gradient)).sum())
    return stuck / moved if moved else 0.0
