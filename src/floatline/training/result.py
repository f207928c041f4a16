"""RunResult: what a run came to, as a trainer gives it back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from floatline.findings import Finding
from floatline.ledger.account import Account


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run.

    Args:
        step: Steps done when it was evaluated.
        metric: The metric then, in FP32.
    """

    step: int
    metric: float

    @classmethod
    def of(cls, saved: Any) -> Best | None:
        """What `as_json` wrote; None for a run that evaluated nothing."""
        return None if saved is None else cls(**saved)

    def as_json(self) -> dict[str, Any]:
        """Plain data for a checkpoint or a report."""
        return asdict(self)


def is_better(metric: float, best: Best | None, *, higher_is_better: bool) -> bool:
    """Whether a metric is the best so far; a NaN never is, and of two equal ones the first stays."""
    if math.isnan(metric) or best is None:
        return best is None and not math.isnan(metric)
    return metric > best.metric if higher_is_better else metric < best.metric


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Args:
        attempted: Steps tried, from the first to the last, over all resumes.
        applied: Those that the optimizer took.
        skipped: The others, by reason.
        first_loss: Loss of the first step, as it was.
        last_loss: Loss of the last one.
        metric: The workload's metric, evaluated in FP32; None where the run did not reach its end.
        seconds: Time of this call.
        folder: The run folder; None where nothing was kept.
        checkpoint: What to go on from.
        ended_by: The signal that ended it, SIGINT or SIGTERM; its state is saved. None where none did.
        stopped: Why the guard ended it; None where it did not.
        finding: The guard's finding, where the cause is known.
        best: The best evaluation, where some were made on the way; its checkpoint is in the folder's `best`.
        epochs: Number and account of each epoch: steps, skips by reason, losses, scale and its reductions.
    """

    attempted: int
    applied: int
    skipped: dict[str, int]
    first_loss: float | None
    last_loss: float | None
    metric: float | None
    seconds: float
    folder: Path | None
    checkpoint: Path | None
    ended_by: int | None = None
    stopped: str | None = None
    finding: Finding | None = None
    best: Best | None = None
    epochs: tuple[tuple[int, Account], ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or SIGTERM ended it."""
        return self.ended_by is not None

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON can hold them; the command line adds target and plan."""
        names = ("interrupted" if field.name == "ended_by" else field.name for field in fields(self))
        plain = {name: getattr(self, name) for name in names}
        for name in ("folder", "checkpoint"):
            plain[name] = None if plain[name] is None else str(plain[name])
        plain["epochs"] = [{"epoch": number, **account.as_json()} for number, account in self.epochs]
        plain["best"] = None if self.best is None else self.best.as_json()
        return {**plain, "finding": None if self.finding is None else self.finding.as_json()}
