"""Progress: a run as its ledger tells it, in bounded memory however long it is, brought up to date by what is new."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from floatline.ledger.account import Account
from floatline.ledger.follower import Follower
from floatline.ledger.lines import Event, Mark, Record, Step

MOST_STRETCHES = 800  # of a curve; from half of this up to this
_MOST_EVENTS = 200  # of the newest
_RATE_STEPS = 200  # newest steps that the pace is taken from


@dataclass(slots=True)
class Spread:
    """Several values of one kind.

    Numerics:
        Mean, low and high are of the finite values; NaN and the infinities are counted. `last` is as it was.
    """

    num: int = 0
    mean: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    num_nan: int = 0
    num_inf: int = 0
    last: float | None = None

    def add(self, value: float) -> None:
        """Take one value in."""
        self.last = value
        if not math.isfinite(value):
            self.num_nan += math.isnan(value)
            self.num_inf += math.isinf(value)
            return
        self.num += 1
        self.mean += value / self.num - self.mean / self.num
        self.low, self.high = min(self.low, value), max(self.high, value)

    def join(self, later: Spread) -> None:
        """Take in the values that follow these."""
        total = self.num + later.num
        if total:
            self.mean = self.mean * (self.num / total) + later.mean * (later.num / total)
        self.num, self.low, self.high = total, min(self.low, later.low), max(self.high, later.high)
        self.num_nan, self.num_inf = self.num_nan + later.num_nan, self.num_inf + later.num_inf
        self.last = self.last if later.last is None else later.last


@dataclass(slots=True)
class Stretch:
    """Steps in a row, drawn as one point.

    Args:
        first: Its first step.
        last: Its last step.
        time: When that was recorded.
        skipped: Steps that were not applied, by reason.
        loss: The losses.
        norm: The gradient norms.
        scale: The loss scales.
        lr: The learning rates.
        lost: The shares of gradients that rounded to zero.
    """

    first: int
    last: int
    time: float
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    loss: Spread = field(default_factory=Spread)
    norm: Spread = field(default_factory=Spread)
    scale: Spread = field(default_factory=Spread)
    lr: Spread = field(default_factory=Spread)
    lost: Spread = field(default_factory=Spread)

    def add(self, step: Step) -> None:
        """Take the next step in."""
        self.last, self.time = step.attempt, step.time
        if step.reason is not None:
            self.skipped[step.reason] = self.skipped.get(step.reason, 0) + 1
        for spread, name in (
            (self.loss, "loss"),
            (self.norm, "grad_norm"),
            (self.scale, "scale"),
            (self.lr, "lr"),
            (self.lost, "lost_share"),
        ):
            if name in step.numbers:
                spread.add(step.numbers[name])

    def join(self, later: Stretch) -> None:
        """Take in the stretch that follows this one."""
        self.last, self.time = later.last, later.time
        for reason, count in later.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count
        for name in ("loss", "norm", "scale", "lr", "lost"):
            getattr(self, name).join(getattr(later, name))


@dataclass(slots=True)
class Layer:
    """What was recorded of one layer's gradient.

    Args:
        name: Its name.
        norm: The unscaled norm, each time it was recorded.
        scaled: The norm times loss scale and micro-batches of its step, which is the norm of the sum that the
            backward passes left: no element of it is larger. A norm of zero is left out.
    """

    name: str
    norm: Spread = field(default_factory=Spread)
    scaled: Spread = field(default_factory=Spread)

    @property
    def num_records(self) -> int:
        """How often it was recorded."""
        return self.norm.num + self.norm.num_nan + self.norm.num_inf


class Progress:
    """What a run came to so far; `update` reads only what its ledger has gained.

    Attributes:
        follower: Where reading stands, and the totals.
        stretches: The run in order, at most `MOST_STRETCHES`.
        layers: By name, where the run records them.
        events: The newest, in order.
        num_events: All of them.
        ended: Whether the ledger was closed in order.
        stopped: Whether the guard ended the run.
        num_resumes: How often the run was gone on with.
        first_time: When the first step that was read was recorded; None before.
        last_time: When the last line was written; None before.
    """

    def __init__(self, folder: Path | str) -> None:
        self.follower = Follower(folder)
        self._restarts = 0
        self._forget()

    def _forget(self) -> None:
        self.stretches: list[Stretch] = []
        self.layers: dict[str, Layer] = {}
        self.events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self.num_events = 0
        self.ended = self.stopped = False
        self.num_resumes = 0
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.steps_per_stretch = 1
        self._times: deque[float] = deque(maxlen=_RATE_STEPS + 1)

    @property
    def run(self) -> Account:
        """The totals."""
        return self.follower.accounts.run

    @property
    def steps_per_second(self) -> float | None:
        """The pace of the newest steps, pauses between them included; None before the second."""
        if len(self._times) < 2 or self._times[-1] <= self._times[0]:
            return None
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])

    def update(self, *, most: int | None = None) -> int:
        """Read what is new; returns how many records that were.

        Args:
            most: Records to read at most, so that a long ledger can be shown while it is read; None reads all.

        Raises:
            LedgerError: There is no ledger, or it cannot be read.
        """
        num = 0
        for record in self.follower.read():
            self._forget_another_run()
            self.add(record)
            num += 1
            if num == most:
                break
        self._forget_another_run()
        return num

    def _forget_another_run(self) -> None:
        if self.follower.num_restarts != self._restarts:
            self._restarts = self.follower.num_restarts
            self._forget()

    def add(self, record: Record) -> None:
        """Take the next record in."""
        self.last_time = record.time
        if isinstance(record, Mark):
            self.ended = record.kind == "end"
            if record.kind == "resume":
                self.num_resumes += 1
                self.stopped = False
                self._times.clear()  # the time between is nobody's pace
            return
        self.ended = False
        if isinstance(record, Event):
            self.events.append(record)
            self.num_events += 1
            self.stopped = self.stopped or record.event == "stop"
            return
        self._add_step(record)

    def _add_step(self, step: Step) -> None:
        self.first_time = step.time if self.first_time is None else self.first_time
        self._times.append(step.time)
        newest = self.stretches[-1] if self.stretches else None
        if (
            newest is None
            or (step.attempt - 1) // self.steps_per_stretch != (newest.last - 1) // self.steps_per_stretch
        ):
            newest = Stretch(step.attempt, step.attempt, step.time)
            self.stretches.append(newest)
        newest.add(step)
        if len(self.stretches) > MOST_STRETCHES:
            self._halve()
        for name, norm in (step.layer_norms or {}).items():
            layer = self.layers.get(name)
            if layer is None:
                layer = self.layers[name] = Layer(name)
            layer.norm.add(norm)
            if norm:
                layer.scaled.add(norm * step.numbers.get("scale", 1.0) * step.counts.get("micro_batches", 1))

    def _halve(self) -> None:
        """Join the stretches two by two, so that a point begins where one of twice the width would."""
        self.steps_per_stretch *= 2
        joined: list[Stretch] = []
        for stretch in self.stretches:
            if (
                joined
                and (joined[-1].last - 1) // self.steps_per_stretch == (stretch.first - 1) // self.steps_per_stretch
            ):
                joined[-1].join(stretch)
            else:
                joined.append(stretch)
        self.stretches = joined
