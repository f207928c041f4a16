"""RunFacts: what a run's ledger says at one moment; the terminal, the page and the JSON are made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from floatline.errors import FormatError
from floatline.formats import Format, find_format
from floatline.ledger.account import Account
from floatline.ledger.lines import Event
from floatline.ledger.progress import Layer, Progress, Stretch

State = Literal["running", "silent", "finished", "interrupted", "stopped", "died"]
"""silent: no new line for long. finished: closed in order, all steps made. interrupted: closed in order before that.
stopped: the guard ended it. died: not closed, and its process is gone."""
OVER: tuple[State, ...] = ("finished", "interrupted", "stopped", "died")
_SILENT_SECONDS, _SILENT_STEPS = 60.0, 20
_GONE_SECONDS = 10.0  # a process that is gone may have written just now


@dataclass(frozen=True)
class LayerFacts:
    """How near one layer's gradient came to the format's limits.

    Numerics:
        `headroom` is log2(format's max / highest), `highest` the largest finite norm, as the backward passes left it:
        times loss scale and micro-batches. No element is larger than the norm, so the largest element can double at
        least that often. It is of the sum of a step: where the gradients of micro-batches or processes cancel, one of
        them held more.

    Args:
        name: Its name.
        norm: The newest unscaled norm.
        newest: The newest norm as the backward passes left it; None where that was always zero.
        highest: The highest of them that was finite; None where none was.
        lowest: The lowest above zero; None where none was.
        headroom: How often the largest element can double at least; None where the format is not known.
        num_records: How often it was recorded.
        num_nonfinite: How often it was NaN or infinite.
    """

    name: str
    norm: float
    newest: float | None
    highest: float | None
    lowest: float | None
    headroom: float | None
    num_records: int
    num_nonfinite: int


@dataclass(frozen=True)
class RunFacts:
    """One run at one moment.

    Args:
        name: Short name of its folder.
        folder: The folder.
        run_id: Name of the run.
        version: The floatline that wrote it.
        started: When, as the header says.
        state: What became of it so far.
        age: Seconds since its last line.
        plan: Name of the plan it began with; '' where the header has none.
        format: The format the plan computes in; None where that is not known.
        account: Totals.
        epochs: Account of each epoch.
        stretches: The run in order.
        steps_per_stretch: Steps that one of them stands for at most.
        layers: Those nearest to a limit first.
        events: The newest.
        num_events: All of them.
        steps: Steps of the whole run, where that is known.
        steps_per_second: Pace of the newest steps.
        seconds: From the first step to the last line.
        num_resumes: How often it was gone on with.
        num_missed: Steps in parts that were deleted: in the totals only.
    """

    name: str
    folder: Path
    run_id: str
    version: str
    started: str
    state: State
    age: float | None
    plan: str
    format: Format | None
    account: Account
    epochs: dict[int, Account]
    stretches: Sequence[Stretch]
    steps_per_stretch: int
    layers: tuple[LayerFacts, ...]
    events: tuple[Event, ...]
    num_events: int
    steps: int | None
    steps_per_second: float | None
    seconds: float | None
    num_resumes: int
    num_missed: int

    @property
    def eta(self) -> float | None:
        """Seconds to go at the pace of the newest steps; None where the steps are not known, or it is over."""
        if self.steps is None or self.steps_per_second is None or self.state in OVER:
            return None
        return max(0, self.steps - self.account.attempted) / self.steps_per_second

    @property
    def grad_norm(self) -> float | None:
        """The newest gradient norm."""
        return next((s.norm.last for s in reversed(self.stretches) if s.norm.last is not None), None)

    @property
    def lr(self) -> float | None:
        """The newest learning rate."""
        return next((s.lr.last for s in reversed(self.stretches) if s.lr.last is not None), None)

    @property
    def lost_share(self) -> float | None:
        """The newest share of gradient elements that rounded to zero."""
        return next((s.lost.last for s in reversed(self.stretches) if s.lost.last is not None), None)

    def as_json(self) -> dict[str, Any]:
        """For programs; what is not known is null."""
        run = self.account
        return {
            "run": str(self.folder),
            "run_id": self.run_id,
            "state": self.state,
            "plan": self.plan or None,
            "format": None if self.format is None else self.format.name,
            "attempted": run.attempted,
            "applied": run.applied,
            "skipped": {reason: count for reason, count in run.skipped.items() if count},
            "loss": {
                "first": run.first_loss,
                "last": run.last_loss,
                "mean": run.mean_loss,
                "num_nan": run.num_nan_losses,
                "num_inf": run.num_inf_losses,
            },
            "scale": {
                "last": run.scale,
                "lowest": run.lowest_scale,
                "highest": run.highest_scale,
                "num_reductions": run.num_scale_reductions,
            },
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "lost_share": self.lost_share,
            "steps": self.steps,
            "steps_per_second": self.steps_per_second,
            "seconds": self.seconds,
            "eta_seconds": self.eta,
            "seconds_since_last_line": self.age,
            "num_resumes": self.num_resumes,
            "layers": [vars(layer) for layer in self.layers],
            "num_events": self.num_events,
            "last_event": str(self.events[-1]) if self.events else None,
        }


def gather(
    progress: Progress, *, name: str, now: float, alive: bool | None = None, steps: int | None = None
) -> RunFacts:
    """The facts of a run that was brought up to date.

    Args:
        progress: The run.
        name: What it is called.
        now: The time, in seconds since 1970.
        alive: Whether the process that writes it still runs; None: that cannot be told.
        steps: Steps of the whole run; None takes what its header says.
    """
    header = progress.follower.header
    metadata: dict[str, Any] = {} if header is None else header.metadata
    raw = metadata.get("plan")
    plan = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    steps = _count(metadata.get("steps")) if steps is None else steps
    fmt = _format(plan.get("compute"))
    first, last = progress.first_time, progress.last_time
    layers = sorted((_layer(layer, fmt) for layer in progress.layers.values()), key=_nearness)
    return RunFacts(
        name=name,
        folder=progress.follower.folder,
        run_id="" if header is None else header.run_id,
        version="" if header is None else header.version,
        started="" if header is None else header.started,
        state=_state(progress, now=now, alive=alive, steps=steps),
        age=None if last is None else max(0.0, now - last),
        plan=str(plan.get("name", "")),
        format=fmt,
        account=progress.run,
        epochs=progress.follower.accounts.epochs,
        stretches=progress.stretches,
        steps_per_stretch=progress.steps_per_stretch,
        layers=tuple(layers),
        events=tuple(progress.events),
        num_events=progress.num_events,
        steps=steps,
        steps_per_second=progress.steps_per_second,
        seconds=None if first is None or last is None else last - first,
        num_resumes=progress.num_resumes,
        num_missed=progress.follower.num_missed,
    )


def _state(progress: Progress, *, now: float, alive: bool | None, steps: int | None) -> State:
    if progress.stopped:
        return "stopped"
    if progress.ended:
        return "interrupted" if steps is not None and progress.run.attempted < steps else "finished"
    age = math.inf if progress.last_time is None else now - progress.last_time
    if alive is False and age > _GONE_SECONDS:
        return "died"
    pace = progress.steps_per_second
    patience = max(_SILENT_SECONDS, _SILENT_STEPS / pace if pace else 0.0)
    return "silent" if math.isfinite(age) and age > patience else "running"


def _layer(layer: Layer, fmt: Format | None) -> LayerFacts:
    scaled = layer.scaled
    highest = scaled.high if scaled.num else None
    return LayerFacts(
        name=layer.name,
        norm=math.nan if layer.norm.last is None else layer.norm.last,
        newest=scaled.last,
        highest=highest,
        lowest=scaled.low if scaled.num else None,
        headroom=None if fmt is None or highest is None or highest <= 0 else math.log2(fmt.max) - math.log2(highest),
        num_records=layer.num_records,
        num_nonfinite=layer.norm.num_nan + layer.norm.num_inf,
    )


def _nearness(layer: LayerFacts) -> tuple[int, float, str]:
    """What was most often not finite first, then the least headroom, or the largest norm."""
    near = layer.headroom if layer.headroom is not None else -(layer.highest or 0.0)
    return -layer.num_nonfinite, near, layer.name


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _format(name: object) -> Format | None:
    try:
        return find_format(name) if isinstance(name, str) else None
    except FormatError:
        return None
