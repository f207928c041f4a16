"""Trial: a short run of a target under a plan, and whether it trains as FP32 does."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from floatline.errors import FloatlineError
from floatline.guard.outcome import Outcome
from floatline.numerics.cuda_autocast import cuda_regions
from floatline.plans import Plan
from floatline.training.settings import shared_policy
from floatline.training.trainer import Trainer
from floatline.workload import Target

# So much of FP32's way down may be missing at the end of a short run.
_MAY_LACK = 0.1
# ... or so much of the loss itself, where FP32 goes nearly nowhere.
_MAY_DIFFER = 0.02
# Steps skipped in the second half of a run are no search for a loss scale any more.
_MAY_SKIP = 0.05
# Of FP32's first loss, or of what it falls by. Weights and batch are the same there; dropout may differ.
_MAY_START_APART = 0.2


@dataclass(frozen=True)
class Trial:
    """What a short run came to.

    Args:
        losses: One for each step that was made.
        skipped: Numbers of the steps that were not applied.
        error: What ended it; '' where it came to its end.
        seconds: How long it took.
        scale: The loss scale of the last step; 1 where the loss is not scaled.
        first_scale: Of the first step, where a script's own scaler may have set it; None: the plan's.
    """

    losses: tuple[float, ...]
    skipped: tuple[int, ...]
    error: str
    seconds: float
    scale: float = 1.0
    first_scale: float | None = None

    @property
    def way(self) -> tuple[float, float]:
        """Mean loss of the first tenth of the steps, and of the last; NaN where there is none, or one is not finite."""
        if not self.losses:
            return math.nan, math.nan
        return _mean(self.losses[: _tenth(self.losses)]), _mean(self.losses[-_tenth(self.losses) :])


def run_trial(target: Target, plan: Plan, *, steps: int, seed: int) -> Trial:
    """Train a target under a plan for a few steps.

    Numerics:
        The loop, the scaler, the optimizer and the arithmetic are those of `floatline train`.

    Args:
        target: A target with build().
        plan: What to train in.
        steps: How many.
        seed: Of the target and of the training.
    """
    began = time.monotonic()
    outcomes: list[Outcome] = []
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the target's own
        try:
            workload = target.build(seed)
            trainer = Trainer(
                workload, plan=plan, policy=shared_policy(workload), folder=None, steps=steps, seed=seed,
                on_step=outcomes.append,
            )  # fmt: skip
            with contextlib.closing(trainer.guard):
                with cuda_regions(), trainer.arithmetic():
                    for _ in range(steps):
                        trainer.step()
                    trainer.guard.drain()
                if not all(bool(p.isfinite().all()) for p in trainer.workload.model.parameters()):
                    error = "weights are not finite"
        except FloatlineError as problem:
            error = str(problem)
        except Exception as problem:  # the user's code in this precision
            error = f"{type(problem).__name__}: {next(iter(str(problem).splitlines()), '')}"
    losses, skipped = _read(outcomes)
    scale = float(outcomes[-1].scale) if outcomes else 1.0
    return Trial(losses, skipped, error, time.monotonic() - began, scale)


def find_shortfall(trial: Trial, fp32: Trial) -> str:
    """What a run lacks against FP32; '' where it trains as FP32 does."""
    if trial.error:
        return trial.error
    if not trial.losses or not math.isfinite(trial.losses[-1]):
        return "the loss is not finite"
    half = len(trial.losses) // 2
    late = [step for step in trial.skipped if step >= half]
    if len(late) > max(1, _MAY_SKIP * (len(trial.losses) - half)):
        return f"{len(late)} of the last {len(trial.losses) - half} steps were skipped"
    applied = [loss for step, loss in enumerate(trial.losses) if step not in set(trial.skipped)]
    # FP32 is given as many steps as were applied: a search for a scale takes some.
    theirs = list(fp32.losses[: len(applied)])
    if not applied or not theirs:
        return "no step was applied"
    begin, end, own = (
        _mean(theirs[: _tenth(theirs)]),
        _mean(theirs[-_tenth(theirs) :]),
        _mean(applied[-_tenth(theirs) :]),
    )
    if not math.isfinite(own):
        return "the loss is not finite"
    # A loss that lacks a term falls, too.
    ours, first = trial.losses[0], fp32.losses[0]
    if abs(ours - first) > _MAY_START_APART * max(abs(first), abs(begin - end)):
        return f"the loss begins at {ours:.4g}, in FP32, with the same weights and batch, at {first:.4g}"
    if not own - end <= max(_MAY_LACK * (begin - end), _MAY_DIFFER * abs(end)):
        return f"the loss ends at {own:.4g}, in FP32 at {end:.4g} from {begin:.4g}"
    return ""


def _read(outcomes: list[Outcome]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    skipped = tuple(number for number, outcome in enumerate(outcomes) if not outcome.applied)
    return tuple(outcome.loss for outcome in outcomes), skipped


def _tenth(losses: Sequence[float]) -> int:
    return max(1, len(losses) // 10)


def _mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
