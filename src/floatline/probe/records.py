"""RunRecord: what one run of a target showed, as plain data for the detectors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from floatline.probe.events import Event
from floatline.probe.failures import Failure


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """An optimizer of the run.

    Args:
        number: As in the events' data.
        name: Such as 'torch.optim.SGD'.
        file: Where it was made.
        line: Line there.
        names: Its parameters' names in the model; '' for one that no model holds.
        num_steps: How often it stepped, skipped steps left out.
        num_idle: How often it was stepped, or was to be, without a single gradient.
        dead: Whether none of its parameters that no model holds ever got a gradient, and there are some.
        by_hand: Whether it stands for lines of the loop that update weights without an optimizer.
    """

    number: int
    name: str
    file: str
    line: int
    names: tuple[str, ...]
    num_steps: int
    num_idle: int
    dead: bool
    by_hand: bool = False

    @property
    def call(self) -> str:
        """What updates the weights."""
        return "an update by hand" if self.by_hand else f"{self.name}.step"


@dataclass(frozen=True, slots=True)
class Untrained:
    """A tensor that the loss gives gradients to and that no optimizer holds; or the other way round.

    Args:
        name: Its name in the model.
        registered: Whether the model knows it as a parameter; False for a tensor or layer in a plain attribute.
        held: Whether an optimizer holds it: then it is its gradient that is missing.
    """

    name: str
    registered: bool
    held: bool = False


@dataclass(frozen=True, slots=True)
class BadTensor:
    """A batch tensor that is not finite, named as in 'batches[2].inputs[0]'."""

    name: str
    batch: int
    num_nan: int
    num_inf: int
    numel: int


@dataclass(slots=True)
class RunRecord:
    """What one run showed.

    Args:
        kind: 'build' where floatline ran the loop, 'train' where the loop is the user's.
        entry: Name of the user's function that was run.
        precision: Of the workload, or of the replay: 'fp32', 'bf16'. '' where only the user's loop knows.
        file: Source file of the target's function.
        losses: One for each backward pass, without the loss scale.
        loss_steps: The step of each loss.
        events: What the loop called.
        exception: What ended it; None where it came to its end.
        num_steps: Steps begun.
        num_batches: Batches in a workload; 0 where the loop is the user's.
        skipped: Steps whose optimizer step a scaler left out.
        scales: The loss scale after each update.
        bad_loss, bad_gradient, bad_weight: The first step with a loss, an applied gradient or a weight that is not
            finite; None where there is none.
        searches_in_loss: Whether losses that are not finite are a search for a scale: a penalty on scaled gradients
            overflows by the scale alone, and every such step was left out.
        weights_finite: Whether all weights and buffers are finite at the end.
        moved, still, no_gradient: Names of parameters that moved, that stood still, and that got no gradient.
        optimizers: Those that were made.
        untrained: What the loss uses and no optimizer trains.
        half_parameters: Names of the FP16 parameters that a scaler was to unscale.
        bad_tensors: Batch tensors that are not finite.
        model: The model after training.
        result: What the user's function returned.
        seconds: How long it took.
    """

    kind: Literal["build", "train"]
    entry: str
    precision: str
    file: str = ""
    losses: list[float] = field(default_factory=list[float])
    loss_steps: list[int] = field(default_factory=list[int])
    events: list[Event] = field(default_factory=list[Event])
    exception: Failure | None = None
    num_steps: int = 0
    num_batches: int = 0
    skipped: list[int] = field(default_factory=list[int])
    scales: list[float] = field(default_factory=list[float])
    bad_loss: int | None = None
    bad_gradient: int | None = None
    bad_weight: int | None = None
    searches_in_loss: bool = False
    weights_finite: bool = True
    moved: list[str] = field(default_factory=list[str])
    still: list[str] = field(default_factory=list[str])
    no_gradient: list[str] = field(default_factory=list[str])
    optimizers: list[OptimizerRecord] = field(default_factory=list[OptimizerRecord])
    untrained: list[Untrained] = field(default_factory=list[Untrained])
    half_parameters: list[str] = field(default_factory=list[str])
    bad_tensors: list[BadTensor] = field(default_factory=list[BadTensor])
    model: nn.Module | None = None
    result: object = None
    seconds: float = 0.0

    def of(self, *kinds: str) -> list[Event]:
        """The events of some kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def first_bad_step(self) -> int | None:
        """The first step with a loss, an applied gradient or a weight that is not finite."""
        return min((s for s in (self.bad_loss, self.bad_gradient, self.bad_weight) if s is not None), default=None)

    @property
    def stuck_skips(self) -> list[int]:
        """Skipped steps that are not the search for a scale.

        A search goes down until a step is applied. A step that is skipped at a scale at which one was applied
        before, and skips that last to the end of the run, are something else.
        """
        worked = 0.0
        found: list[int] = []
        tail: list[int] = []
        for event in self.of("scaler-step"):
            scale = event.data["scale"]
            if event.data["applied"]:
                worked, tail = max(worked, scale), []
                continue
            tail.append(event.step)
            if scale <= worked:
                found.append(event.step)
        return found or (tail if len(tail) > 20 else [])

    @property
    def step_to_trace(self) -> int:
        """The step to look into: the first bad one that is no search for a scale, or else a late one."""
        if self.exception is not None:
            return self.exception.step
        stuck = self.stuck_skips
        # Where nothing but skips is left, the last has the smallest scale: no search can explain it.
        never_ends = len(stuck) > 20 and bool(self.skipped) and self.skipped[-1] >= self.num_steps - 1
        candidates = [self.first_bad_step, (stuck[-1] if never_ends else stuck[0]) if stuck else None]
        return min((step for step in candidates if step is not None), default=self.loss_steps[-1] if self.losses else 0)

    def progress(self, other: RunRecord) -> float:
        """How far the loss fell, as a share of how far the other run's fell; 1 where that one did not fall."""
        own, theirs = _fall(self.losses), _fall(other.losses)
        if theirs is None or theirs <= 0:
            return 1.0
        return -math.inf if own is None else own / theirs


def _fall(losses: Iterable[float]) -> float | None:
    """From the mean of the first tenth to that of the last; None where one is not finite."""
    values = list(losses)
    size = max(len(values) // 10, 1)
    ends = [sum(part) / size for part in (values[:size], values[-size:]) if part]
    if len(ends) < 2 or not all(map(math.isfinite, ends)):
        return None
    return ends[0] - ends[1]
