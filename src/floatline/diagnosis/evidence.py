"""Evidence: what was seen of a target, run as it is and in FP32, and looked into step by step when a detector asks."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from floatline.base.work_clock import WorkClock
from floatline.diagnosis.beside_fp32 import StepErrors
from floatline.diagnosis.gaps import Shown
from floatline.errors import TargetError
from floatline.probe.runs.records import RunRecord
from floatline.probe.runs.runs import Precision, trace_target
from floatline.probe.trace.trace import Trace
from floatline.probe.watch.events import ScalerStepEvent
from floatline.workload import Target

# A run whose loss fell by less than this share of FP32's has lost something.
KEEPS_UP = 0.8
# So has one that ends this much above FP32's loss, where it fell by less than the second share.
ENDS_ABOVE, NEARLY_KEEPS_UP = 1.5, 0.9
# What FP32 gains beyond it must be this share of the loss: the rest is rounding of a run that had nothing to learn.
WORTH_IT = 0.01
# First losses, of the same weights and batch, that differ by more than this share: the forward pass is wrong.
APART = 0.5
# A slow run is compared step by step. Of FP32's fall this share must be missing, and the gap must grow evenly: what is
# left beside a straight line is at most this share of it.
MISSING, UNEVEN, LONG_ENOUGH = 0.5, 0.1, 20
# A loss that has grown by this is no noise; one that a run ends with, no healthy run ends with.
GROWN = 10.0
RUN_AWAY = 1000.0


@dataclass
class Evidence:
    """Two runs of a target, and traces of steps, recorded when they are asked for.

    Args:
        target: The target.
        seed: Seed of every run.
        given: The run as it is.
        fp32: The same in FP32.
        on_progress: Told what is done next.
        steps: That a train() was given; None is its own number.
        found_in: The trace in which the findings were found; None where no step was looked into.
        seconds_of_trace: How long the last recording took.
        is_apart: Whether its losses were seen to be apart from FP32's by more than a nudge does.
    """

    target: Target
    seed: int
    given: RunRecord
    fp32: RunRecord
    on_progress: Callable[[str], None]
    steps: int | None = None
    traces: dict[tuple[int, Precision | None], Trace | None] = field(
        default_factory=dict[tuple[int, "Precision | None"], "Trace | None"]
    )
    found_in: Trace | None = None
    seconds_of_trace: float = 0.0
    is_apart: bool = False

    def trace(self, step: int, precision: Precision | None = None) -> Trace | None:
        """The trace of a step; None where the target does not get there."""
        key = (step, precision)
        if key not in self.traces:
            self.on_progress(f"recording step {step}" + (" in FP32" if precision else ""))
            self.traces[key] = None
            clock = WorkClock()
            with contextlib.suppress(TargetError):
                self.traces[key] = trace_target(
                    self.target, step=step, steps=self.steps, seed=self.seed, precision=precision
                )
            self.seconds_of_trace = clock.seconds
        return self.traces[key]

    @property
    def fails(self) -> bool:
        """Whether the run as given shows inf or NaN that is no search for a scale."""
        return self.given.first_bad_step is not None or self.keeps_skipping

    @property
    def keeps_skipping(self) -> bool:
        """Whether a scaler skips steps beyond what its search takes: to the end, or again and again."""
        steps = [event.applied for event in self.given.of(ScalerStepEvent)]
        late = steps[len(steps) // 2 :]
        return len(steps) >= 10 and (not any(steps[-10:]) or late.count(False) > 0.2 * len(late))

    @property
    def overflows_unscaled(self) -> bool:
        """Whether a scaler that came down to 1 skipped steps there, too: what overflows then does so by itself."""
        events = self.given.of(ScalerStepEvent)
        return _lowers_scale(events) and sum(not event.applied and event.scale <= 1.0 for event in events) > 1

    def scale_at(self, step: int) -> float:
        """The loss scale of a step, where a scaler moves it; 1 where there is none, or one that skipped steps leave."""
        steps = self.given.of(ScalerStepEvent)
        if not _lowers_scale(steps):
            return 1.0
        scales = [event.scale for event in steps if event.step <= step]
        return float(scales[-1]) if scales else 1.0

    @property
    def fails_in_fp32(self) -> bool:
        """Whether FP32 shows inf or NaN, too."""
        return self.fp32.first_bad_step is not None

    @property
    def falls_behind(self) -> bool:
        """Whether the loss fell clearly less than in FP32."""
        return self.falls_behind_by(WORTH_IT)

    def falls_behind_by(self, share: float) -> bool:
        """Whether the loss fell less than in FP32, and by more than a share of its size."""
        return self.is_behind(self.given, share)

    def is_behind(self, record: RunRecord, share: float = WORTH_IT) -> bool:
        """The same of another run.

        FP32 is given as many steps as were applied: those that a search for a scale took are not held against it.
        """
        skipped, seen = set(record.skipped), zip(record.losses, record.loss_steps, strict=True)
        losses = [loss for loss, step in seen if step not in skipped]
        own, theirs = _ends(losses), _ends(self.fp32.losses[: len(losses)])
        if own is None or theirs is None or theirs[0] <= theirs[1]:
            return False
        # From FP32's start: a loss that 16 bits make larger from the first step on has not fallen further for that.
        progress = (min(own[0], theirs[0]) - own[1]) / (theirs[0] - theirs[1])
        if (1 - progress) * (theirs[0] - theirs[1]) < share * max(map(abs, theirs)):
            return False
        return progress < KEEPS_UP or (progress < NEARLY_KEEPS_UP and own[1] > ENDS_ABOVE * theirs[1] > 0)

    def rounds_only_loss(self, errors: StepErrors) -> bool:
        """Whether the loss is behind by its own rounding alone, which no gradient depends on."""
        return errors.explain(Shown(tuple(self.given.losses)), Shown(tuple(self.fp32.losses)))

    @property
    def starts_apart(self) -> bool:
        """Whether the first loss is far from FP32's: no training has made that."""
        if not (self.given.losses and self.fp32.losses):
            return False
        own, theirs = self.given.losses[0], self.fp32.losses[0]
        return abs(own - theirs) > APART * max(abs(own), abs(theirs))

    @property
    def stands_still(self) -> bool:
        """Whether FP32's loss falls, however slowly, and this one keeps less than half of that.

        The same batches are compared with each other, so that their noise is in neither.
        """
        own, theirs = self.given.losses, self.fp32.losses
        num = min(len(own), len(theirs))
        gap, ends = [a - b for a, b in zip(own[:num], theirs[:num], strict=True)], _ends(theirs[:num])
        apart = _ends(gap)
        if num < LONG_ENOUGH or self.given.skipped or ends is None or apart is None:
            return False
        fall, rise = ends[0] - ends[1], apart[1] - apart[0]
        line = [apart[0] + rise * i / (num - 1) for i in range(num)]
        beside = math.sqrt(sum((a - b) ** 2 for a, b in zip(gap, line, strict=True)) / num)
        return fall > 0 and rise > MISSING * fall and beside < UNEVEN * rise

    def motion(self, name: str) -> float:
        """How far a parameter is from FP32's at the end, against the model's weights; 0 where it is not known.

        Not against its own size alone: a bias of 0 that moves by next to nothing would have gone far.
        """
        if self.given.model is None or self.fp32.model is None:
            return 0.0
        own = dict(self.given.model.named_parameters()).get(name)
        weights = {key: p.detach().double() for key, p in self.fp32.model.named_parameters()}
        if own is None or name not in weights or own.shape != weights[name].shape:
            return 0.0
        usual = math.sqrt(
            sum(float(w.square().sum()) for w in weights.values()) / sum(w.numel() for w in weights.values())
        )
        size = max(_rms(weights[name]), usual, 1e-30)
        return _rms(own.detach().double() - weights[name]) / size

    def growth(self, names: Sequence[str]) -> float | None:
        """By what share parameters together are larger at the end than FP32's; None where that is not known."""
        if self.given.model is None or self.fp32.model is None:
            return None
        own, theirs = (_norm_of(record.model, names) for record in (self.given, self.fp32))
        return own / theirs - 1 if theirs else None


def is_diverging(losses: list[float]) -> bool:
    """Whether the losses grow geometrically."""
    finite = [abs(loss) for loss in losses if abs(loss) < float("inf")]
    if not finite:
        return False
    start = max(min(finite[:3]), 1e-12)
    return max(finite[-3:]) > 100 * start or (len(finite) < len(losses) and max(finite) > 30 * start)


def runs_away(losses: list[float], *, until: int | None = None) -> bool:
    """Whether losses that stay finite grow without end.

    Args:
        losses: Of an FP32 run.
        until: Place among them by which they must have begun to grow; None does not ask.
    """
    if len(losses) < 5 or not all(map(math.isfinite, losses)):
        return False
    size = max(1, len(losses) // 5)
    start = max(abs(losses[0]), 1e-6)
    begun = until is None or max(losses[: until + 1]) > GROWN * start
    return begun and statistics.median(losses[-size:]) > RUN_AWAY * start


def _lowers_scale(steps: list[ScalerStepEvent]) -> bool:
    """Whether a step that is left out lowers the scale for the next; also where none is, or none comes after it."""
    last: dict[tuple[int, int], ScalerStepEvent] = {}
    fell: list[bool] = []
    for event in steps:
        key = (event.scaler, event.optimizer)
        if key in last and not last[key].applied:
            fell.append(event.scale < last[key].scale)
        last[key] = event
    return any(fell) or not fell


def _norm_of(model: nn.Module | None, names: Sequence[str]) -> float:
    weights = dict(model.named_parameters()) if model is not None else {}
    return math.sqrt(sum(float(weights[name].detach().double().square().sum()) for name in names if name in weights))


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _ends(losses: list[float]) -> tuple[float, float] | None:
    """Means of the first and the last tenth; None where one is not finite."""
    size = max(len(losses) // 10, 1)
    ends = [sum(part) / size for part in (losses[:size], losses[-size:]) if part]
    return (ends[0], ends[1]) if len(ends) == 2 and all(map(math.isfinite, ends)) else None
