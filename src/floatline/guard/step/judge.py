"""The judge: what happens to a step, decided on the device from loss and gradients, without a host read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from floatline.errors import GuardError
from floatline.guard.policy import Policy
from floatline.guard.step.samples import Samples
from floatline.optim.mesh import num_processes
from floatline.optim.survey import Decision, Survey
from floatline.plans import Scaling

WINDOW = 128  # accepted steps whose spread is the measure of a step
RECENT = 16  # accepted steps whose median is the level
NAMES = ("loss", "scale", "grad_norm", "reason", "loss_score", "norm_score")
# Places in ledger.lines.REASONS, counted from 1; 0 is 'applied'.
OVERFLOW, FORWARD_NONFINITE, OUTLIER, REQUESTED = 1.0, 2.0, 3.0, 4.0
ROBUST = 1.4826 / math.sqrt(2)


@dataclass(frozen=True)
class Verdict:
    """What was decided, on the device.

    Args:
        decision: For the optimizer.
        report: The numbers of NAMES, float32.
        divisor: The mean of all processes' divisors, which gradients were divided by; None where there is only one.
        votes: For each process, whether it is for skipping the step; None where there is only one.
    """

    decision: Decision
    report: Tensor
    divisor: Tensor | None = None
    votes: Tensor | None = None


@dataclass(frozen=True)
class Seen:
    """What is judged: numbers on the device that all processes share.

    Args:
        loss: Mean of the losses, each as often as its process's divisor says.
        worst: The largest of them, NaN where one is not finite; None where there is only one.
        size: Norm of the unscaled gradients, inf where one is not finite; or the sum of squares of the scaled ones.
        is_total: Whether `size` is that sum.
        skip: Whether a process wants to skip.
        divisor: Mean of the divisors; None where there is only one.
        known: Whether a process has skipped a sample of its batch before; None where nobody asks.
        votes: For each process, whether its loss is not finite, or where all are, its gradients, or it wants to skip.
    """

    loss: Tensor
    worst: Tensor | None
    size: Tensor
    is_total: bool
    skip: bool | Tensor | None = None
    divisor: Tensor | None = None
    known: Tensor | None = None
    votes: Tensor | None = None


class Judge:
    """Keeps scale and windows on the device, in the same tensors always, and judges one step after the other.

    Numerics:
        Score of x: (ln x - median of the last 16) / max(score_floor, 1.4826 median|d| / sqrt 2), where d are the
        differences between neighbours among the last 128; differences take the trend out. Only applied steps enter
        the windows, so neither NaN nor an outlier that is skipped ever moves them. No score before `outlier_warmup`
        steps, and none for x <= 0: NaN then, which is never above the limit. Scores are reported; they decide on a
        step only where the policy has `skip_outliers`.
        Scale: x backoff on overflow (from the hysteresis-th in a row on), x growth after growth_interval applied
        steps, kept within floor and cap. A loss that is not finite says nothing about the scale: it stays.
        Everything is chosen with `where`; nothing is multiplied by zero. Checked by
        tests/guard/step/test_judge.py against a float64 implementation with Python's statistics.median.

    Args:
        device: Where the gradients are.
        scaling: How the loss is scaled; None is a scale of 1 that never moves.
        policy: The numbers.
        group: Processes that train together; None is the default group.
        launch: The whole judgement in one launch; None: torch operations.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        scaling: Scaling | None,
        policy: Policy,
        group: dist.ProcessGroup | None = None,
        launch: JudgeLaunch | None = None,
    ) -> None:
        self.device = device
        self.scaling = scaling
        self.policy = policy
        self.group = group
        self.scale = torch.full((), 1.0 if scaling is None else scaling.init_scale, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.float32, device=device)
        self.overflows = torch.zeros((), dtype=torch.float32, device=device)
        self.window = torch.full((2, WINDOW), math.nan, dtype=torch.float32, device=device)
        self._launch = launch

    @torch.no_grad()
    def judge(
        self,
        loss: Tensor,
        survey: Survey,
        *,
        clip_norm: float = math.inf,
        divisor: float | Tensor = 1.0,
        norm: Tensor | None = None,
        skip: bool | Tensor | None = None,
        samples: Samples | None = None,
    ) -> Verdict:
        """Decide one step, and move scale and windows accordingly.

        Args:
            loss: The unscaled loss.
            survey: Of the scaled gradients.
            clip_norm: Largest norm that is let through; inf lets all through.
            divisor: What gradients are divided by besides the scale: the batches that were summed.
            norm: Scaled norm that is clipped by, where it is not the Euclidean one.
            skip: True: do not make the step, whatever was found.
            samples: Knows the batch, where outliers are skipped: one that was skipped before is not skipped again.
        """
        known = None if samples is None else samples.were_skipped()
        if num_processes(self.group) == 1 and norm is None:
            own = loss.detach().to(torch.float32).reshape(())
            seen = Seen(own, None, survey.whole.total, is_total=True, known=known)
        else:
            seen = self._agree(loss.detach().to(torch.float32), survey, norm, divisor, skip, known)
            skip = seen.skip
            divisor = divisor if seen.divisor is None else seen.divisor
        if self._launch is not None:
            verdict = self._launch(self, seen, clip_norm=clip_norm, divisor=divisor, skip=skip)
        else:
            verdict = self._judge(seen, clip_norm=clip_norm, divisor=divisor, skip=skip)
        if samples is not None:
            samples.note(verdict.report[NAMES.index("reason")] == OUTLIER)
        return verdict if seen.divisor is None else replace(verdict, divisor=seen.divisor, votes=seen.votes)

    def _judge(self, seen: Seen, *, clip_norm: float, divisor: float | Tensor, skip: bool | Tensor | None) -> Verdict:
        scale = self.scale
        unit = scale * divisor
        loss = seen.loss.to(self.device)
        worst = loss if seen.worst is None else seen.worst
        size = seen.size.sqrt() / unit if seen.is_total else seen.size
        values = torch.stack([worst, size])
        logs = values.log()
        scores = self._scores(logs)
        outlier = size > self.policy.skip_norm_above
        if self.policy.skip_outliers:
            strange = (scores > self.policy.outlier_score).any()
            outlier = outlier | (strange if seen.known is None else strange & ~seen.known)
        reason = torch.where(outlier, OUTLIER, 0.0)
        if skip is not None:
            wanted = torch.as_tensor(skip, device=self.device).to(torch.bool).reshape(())
            reason = torch.where(wanted, REQUESTED, reason)
        reason = torch.where(size.isfinite(), reason, OVERFLOW)
        reason = torch.where(worst.isfinite(), reason, FORWARD_NONFINITE)
        applied = reason == 0.0
        report = torch.stack([loss, scale, size, reason, scores[0], scores[1]])
        factor = unit.reciprocal()
        if math.isfinite(clip_norm):
            factor = (clip_norm / (size + 1e-6)).clamp(max=1.0) * factor
        moved = torch.cat([self.window[:, 1:], logs[:, None]], 1)
        self.window.copy_(torch.where((applied & logs.isfinite())[:, None], moved, self.window))
        self._move_scale(applied, reason == OVERFLOW)
        return Verdict(Decision(applied, factor, size), report)

    def _scores(self, logs: Tensor) -> Tensor:
        """Score of each value; NaN where there is none."""
        spread = self.window.diff(dim=1).abs().sort(dim=1).values  # NaN comes last
        known = (~self.window.isnan()).sum(1, keepdim=True)
        num = (known - 1).clamp(min=1)
        places = torch.cat([(num - 1) // 2, num // 2], 1)
        median = spread.gather(1, places).mean(1)
        level = self.window[:, -RECENT:].sort(dim=1).values[:, RECENT // 2 - 1 : RECENT // 2 + 1].mean(1)
        scores = (logs - level) / (median * ROBUST).clamp(min=self.policy.score_floor)
        ready = (known[:, 0] >= self.policy.outlier_warmup) & logs.isfinite()
        return torch.where(ready, scores, math.nan)

    def _move_scale(self, applied: Tensor, overflow: Tensor) -> None:
        scaling = self.scaling
        if scaling is None:
            return
        self.overflows.copy_(torch.where(overflow, self.overflows + 1, torch.where(applied, 0.0, self.overflows)))
        fall = overflow & (self.overflows >= scaling.hysteresis)
        good = torch.where(applied, self.good_steps + 1, torch.where(overflow, 0.0, self.good_steps))
        grow = good >= scaling.growth_interval
        scale = torch.where(fall, self.scale * scaling.backoff_factor, self.scale)
        scale = torch.where(grow, scale * scaling.growth_factor, scale)
        self.scale.copy_(scale.clamp(scaling.floor, scaling.cap))
        self.good_steps.copy_(torch.where(grow, 0.0, good))

    def _agree(
        self,
        loss: Tensor,
        survey: Survey,
        norm: Tensor | None,
        divisor: float | Tensor,
        skip: bool | Tensor | None,
        known: Tensor | None,
    ) -> Seen:
        """What all processes see together: one all-reduce, whatever their number, and whether gradients are sharded."""
        loss = loss.reshape(()).to(self.device)
        world = num_processes(self.group)
        total = self._share_of_total(survey, world)
        # A sum of squares that is not finite speaks, whatever the norm that is clipped by.
        size = total if norm is None else torch.where(total.isfinite(), norm.to(torch.float32), math.inf)
        if world == 1:
            size = size.sqrt() if norm is None else size
            return Seen(loss, None, size / (self.scale * divisor), is_total=False, skip=skip, known=known)
        wanted = torch.as_tensor(False if skip is None else skip, device=self.device).to(torch.float32).reshape(())
        # A row for each process: summing rows of zeros hands every process all rows, inf and NaN included.
        rows = torch.zeros(world, 5, dtype=torch.float32, device=self.device)
        # Gradients were averaged over the processes: so are the divisors, or the replicas would come apart.
        share = torch.zeros((), dtype=torch.float32, device=self.device) + divisor
        met = torch.zeros_like(wanted) if known is None else known.to(torch.float32)
        rows[dist.get_rank(self.group)] = torch.stack([loss, size, wanted, share, met])
        dist.all_reduce(rows, group=self.group)
        losses, divisors = rows[:, 0], rows[:, 3]
        divisor = divisors.mean()
        # max would hide -inf.
        worst = torch.where(losses.isfinite().all(), losses.max(), math.nan)
        mean = (losses * divisors).mean() / divisor
        size = rows[:, 1].sum().sqrt() if norm is None else rows[:, 1].max()
        size = torch.where(size.isfinite(), size / (self.scale * divisor), math.inf)
        known = None if known is None else (rows[:, 4] > 0).any()
        bad = ~losses.isfinite()
        votes = (torch.where(bad.any(), bad, ~rows[:, 1].isfinite()) | (rows[:, 2] > 0)).to(torch.float32)
        skips = (rows[:, 2] > 0).any()
        return Seen(mean, worst, size, is_total=False, skip=skips, divisor=divisor, known=known, votes=votes)

    def _share_of_total(self, survey: Survey, world: int) -> Tensor:
        """What this process adds to the sum of squares: each gradient's part, or 1 / N of what all N processes hold."""
        if survey.parts is not None and self.group is None:
            return (survey.sums * survey.parts).sum() / world
        # The processes of another group than the default one may hold different parts.
        return survey.whole.total / world

    def forget(self) -> None:
        """Empty the windows: what comes now is a new normal."""
        self.window.fill_(math.nan)

    def forget_norms(self) -> None:
        """Empty the window of the norms alone."""
        self.window[1].fill_(math.nan)

    def set_scale(self, scale: float) -> None:
        """Take this scale, brought within floor and cap, and count good steps from 0."""
        if self.scaling is None:
            return
        if not math.isfinite(scale) or scale <= 0:
            raise GuardError(f"Scale {scale!r} cannot be used. Give a finite number above 0.")
        self.scale.fill_(min(max(scale, self.scaling.floor), self.scaling.cap))
        self.good_steps.zero_()

    def state(self) -> dict[str, Tensor]:
        """Everything that is carried from step to step, by name."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "overflows": self.overflows,
            "window": self.window,
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take what `state` gave."""
        for name, tensor in self.state().items():
            if name not in state or state[name].shape != tensor.shape:
                raise GuardError(f"The checkpoint has no {name!r} of shape {tuple(tensor.shape)}. Load another one.")
            tensor.copy_(state[name])


class JudgeLaunch(Protocol):
    """The whole judgement in one launch."""

    def __call__(
        self, judge: Judge, seen: Seen, *, clip_norm: float, divisor: float | Tensor, skip: bool | Tensor | None
    ) -> Verdict:
        """What `Judge.judge` does with torch operations."""
        ...
