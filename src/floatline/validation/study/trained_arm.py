"""One seed of one arm, trained under the guard: same start, same data order, same evaluation in every arm."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import deque
from dataclasses import replace

import torch
from torch import nn

from floatline.guard.outcome import Outcome
from floatline.numerics.rounding import round_nearest
from floatline.plans import Plan
from floatline.training.settings import shared_policy
from floatline.training.trainer import Trainer
from floatline.validation.running.jobs import Job
from floatline.validation.study.limits import checkpoints_of
from floatline.validation.verdict.curves import late_peak
from floatline.validation.verdict.pairs import NUM_FIRST_LOSSES, ArmRun
from floatline.workload import Workload, load_target

NUDGE = 1e-7
BROKEN_FORMAT = "float8_e5m2"


def run_job(job: Job) -> ArmRun:
    """Load the target, and train it as the job says."""
    return train_job(job, load_target(job.settings["target"]).build(job.seed))


def train_job(job: Job, workload: Workload) -> ArmRun:
    """Train a workload as the job says.

    Numerics:
        The start is that of `build(seed)`; 'nudged' multiplies every FP32 weight by 1 + 1e-7 or 1 - 1e-7, at random,
        which moves each by one or two units in the last place. 'broken' rounds the trained weights to FP8 (e5m2)
        after every step, as a run in pure FP8 without a master would: nearly every update is lost. The metric is
        evaluated in FP32; 16-bit weights are evaluated as they are, without their master's remainder.
        Checked by tests/validation/study/test_trained_arm.py.

    Args:
        job: Plan, steps, batches, and what is changed on purpose.
        workload: Fresh from its builder.
    """
    began, settings = time.monotonic(), job.settings
    workload = first_batches(workload, settings["num_batches"])
    if settings["change"] == "nudged":
        nudge_weights(workload.model, job.seed)
    steps = settings["steps"]
    trainer = Trainer(
        workload,
        plan=Plan(**settings["plan"]),
        policy=shared_policy(workload),
        folder=None,
        steps=max(1, steps),
        seed=job.seed,
    )
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    start = trainer.measure(master=False)
    if steps == 0:
        trainer.guard.close()
        return ArmRun(
            job.arm, job.seed, start, start=start, steps=0, applied=0, skipped=0, weights_changed=False,
            seconds=time.monotonic() - began,
        )  # fmt: skip
    diary = _Diary(trainer, broken=settings["change"] == "broken", by_metric=settings["curve_of"] == "metric")
    trainer.on_step = diary.note
    result = trainer.run(evaluate=False)
    if result.ended_by is not None:
        signal.raise_signal(result.ended_by)  # for whoever waits for it: SIGTERM is not told as Ctrl-C
        raise KeyboardInterrupt
    diary.read(0)
    metric = _final_metric(trainer) if result.stopped is None else math.nan
    after = workload.model.parameters()
    return ArmRun(
        arm=job.arm,
        seed=job.seed,
        metric=metric,
        diverged=result.stopped is not None or not math.isfinite(metric),
        start=start,
        curve=diary.curve_to(trainer.steps_done, metric),
        curve_of="metric" if diary.by_metric else "loss",
        first_losses=tuple(diary.losses[:NUM_FIRST_LOSSES]),
        steps=result.attempted,
        applied=result.applied,
        skipped=result.attempted - result.applied,
        peak=late_peak(diary.losses),
        weights_changed=any(not torch.equal(old, new) for old, new in zip(before, after, strict=True)),
        seconds=time.monotonic() - began,
    )


def first_batches(workload: Workload, num: int | None) -> Workload:
    """The workload with its first batches only; 0 is no training, and is left to the steps."""
    return workload if not num else replace(workload, batches=list(workload.batches[:num]))


@torch.no_grad()
def nudge_weights(model: nn.Module, seed: int) -> None:
    """Move every FP32 weight up or down by 1e-7 of itself, the same way for the same seed."""
    dice = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dtype != torch.float32:
            continue
        signs = torch.randint(0, 2, parameter.shape, generator=dice).to(parameter.device) * 2 - 1
        parameter.copy_((parameter.double() * (1.0 + NUDGE * signs)).float())


class _Diary:
    """Losses as they were, and the curve at the checkpoints."""

    def __init__(self, trainer: Trainer, *, broken: bool, by_metric: bool) -> None:
        self.losses: list[float] = []
        self.by_metric = by_metric
        self._trainer = trainer
        self._broken = broken
        self._checkpoints = checkpoints_of(trainer.steps)
        self._metrics: list[tuple[int, float]] = []
        self._outcomes: deque[Outcome] = deque()

    def note(self, outcome: Outcome) -> None:
        """Called after every step."""
        if self._broken:
            _ruin(self._trainer.workload.model)
        self._outcomes.append(outcome)
        self.read(self._trainer.guard.policy.read_after)
        done = self._trainer.steps_done
        if self.by_metric and done in self._checkpoints[:-1]:
            self._metrics.append((done, self._trainer.measure(master=False)))

    def read(self, leave: int) -> None:
        """Read the losses of all but the last steps, which a GPU may still be at."""
        while len(self._outcomes) > leave:
            self.losses.append(self._outcomes.popleft().loss)

    def curve_to(self, last: int, metric: float) -> tuple[tuple[int, float], ...]:
        """The metric at the checkpoints, the end among them; or the mean loss of the steps up to each."""
        if self.by_metric:
            return (*(point for point in self._metrics if point[0] < last), (last, metric))
        ends = [step for step in self._checkpoints if step <= len(self.losses)]
        starts = [0, *ends[:-1]]
        return tuple(
            (end, math.fsum(self.losses[first:end]) / (end - first))
            if all(map(math.isfinite, self.losses[first:end]))
            else (end, math.nan)
            for first, end in zip(starts, ends, strict=True)
        )


@torch.no_grad()
def _ruin(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.copy_(round_nearest(parameter, BROKEN_FORMAT))


def _final_metric(trainer: Trainer) -> float:
    """The metric at the end; NaN where it cannot be taken of weights that are not finite."""
    try:
        return trainer.measure(master=False)
    except Exception:
        with contextlib.suppress(RuntimeError):
            if not all(bool(p.isfinite().all()) for p in trainer.workload.model.parameters()):
                return math.nan
        raise
