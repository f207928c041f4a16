"""A first look at a target: whether it can be validated, its batches, its metric, and what evaluating it costs."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Literal

from floatline.errors import TargetError
from floatline.validate.limits import NUM_CHECKPOINTS
from floatline.workload import Workload, load_target

# The first sets things up; of the others the median counts.
_TRIAL_STEPS = 4
# Evaluating on the way may cost this much of the training; what costs more is evaluated at the end only.
_MOST_EVALUATING = 0.5


@dataclass(frozen=True)
class Inspection:
    """What was found out about a target.

    Args:
        metric: Name of its metric: that of its evaluate function, or 'loss'.
        num_batches: Batches that it has.
        step_seconds: One FP32 step, roughly.
        evaluate_seconds: One evaluation.
        higher_is_better: As the workload says; None: it does not say.
    """

    metric: str
    num_batches: int
    step_seconds: float
    evaluate_seconds: float
    higher_is_better: bool | None = None

    def curve_of(self, steps: int) -> Literal["metric", "loss"]:
        """What to record on the way: the metric where that is cheap against so many steps, else the training loss."""
        evaluating = (NUM_CHECKPOINTS - 1) * self.evaluate_seconds
        return "metric" if evaluating <= _MOST_EVALUATING * steps * self.step_seconds else "loss"


def inspect_target(settings: dict[str, Any]) -> dict[str, Any]:
    """Called in a child process: load the target, and look at it."""
    target = load_target(settings["target"])
    if target.builder is None:
        raise TargetError(
            f"Target '{target.text}' has only train(), which cannot be started twice from the same weights. Add "
            "build(), or run it as a command with --baseline and --candidate."
        )
    return vars(inspect_workload(target.build(settings["seed"]), settings))


def inspect_workload(workload: Workload, settings: dict[str, Any]) -> Inspection:
    """Evaluate a workload once, and take a few steps of it."""
    # Whoever only reads an inspection needs no torch.
    from floatline.plan import Plan
    from floatline.training.settings import shared_policy
    from floatline.training.trainer import Trainer
    from floatline.validate.trained_arm import first_batches

    metric, higher = workload.metric_name, workload.higher_is_better
    num_batches = len(workload.batches)
    workload = first_batches(workload, settings["num_batches"])
    trainer = Trainer(
        workload,
        plan=Plan(**settings["plan"]),
        policy=shared_policy(workload),
        folder=None,
        steps=_TRIAL_STEPS,
        seed=settings["seed"],
    )
    began = time.monotonic()
    trainer.measure()
    evaluated = time.monotonic()
    seconds = evaluated - began
    times: list[float] = []
    for _ in range(_TRIAL_STEPS):
        began = time.monotonic()
        trainer.step()
        trainer.guard.drain()
        times.append(time.monotonic() - began)
    trainer.guard.close()
    return Inspection(metric, num_batches, statistics.median(times[1:]), seconds, higher)
