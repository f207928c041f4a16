"""Account: what a run came to so far, in all and per epoch, added up one record at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from floatline.base.json_values import decode_number, encode_number
from floatline.ledger.lines import REASONS, Event, Record, Step, decode_record, encode_record, take_count

MAX_EPOCHS = 4096  # of the newest; the accounts stand in every header, and a header is one line


@dataclass
class Account:
    """Sums over the steps of an epoch, or of a run.

    Numerics:
        `mean_loss` is the running mean of the finite losses of all attempted steps, skipped ones too; it does not
        overflow where the sum would. A NaN or an infinite loss is counted and enters no mean.
        A reduction is a step whose scale is below the scale of the step before it.
    """

    attempted: int = 0
    applied: int = 0
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    num_finite_losses: int = 0
    num_nan_losses: int = 0
    num_inf_losses: int = 0
    num_scale_reductions: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    mean_loss: float | None = None
    scale: float | None = None
    lowest_scale: float | None = None
    highest_scale: float | None = None

    @property
    def num_skipped(self) -> int:
        """Attempted steps that were not applied, whatever the reason."""
        return sum(self.skipped.values())

    @property
    def num_overflows(self) -> int:
        """Steps that were skipped because a gradient overflowed."""
        return self.skipped["overflow"]

    @property
    def success_rate(self) -> float | None:
        """Share of the attempted steps that was applied; None before the first."""
        return self.applied / self.attempted if self.attempted else None

    def add(self, step: Step, *, reduced: bool) -> None:
        """Add one step; `reduced` says that its scale is below the one before."""
        self.attempted += 1
        self.applied += step.applied
        if step.reason is not None:
            self.skipped[step.reason] += 1
        if "loss" in step.numbers:
            self._add_loss(step.numbers["loss"])
        self.num_scale_reductions += reduced
        scale = step.numbers.get("scale")
        if scale is None:
            return
        self.scale = scale
        if self.lowest_scale is None or scale < self.lowest_scale:
            self.lowest_scale = scale
        if self.highest_scale is None or scale > self.highest_scale:
            self.highest_scale = scale

    def _add_loss(self, loss: float) -> None:
        if self.first_loss is None:
            self.first_loss = loss
        self.last_loss = loss
        if math.isnan(loss):
            self.num_nan_losses += 1
        elif math.isinf(loss):
            self.num_inf_losses += 1
        else:
            self.num_finite_losses += 1
            mean, count = self.mean_loss or 0.0, self.num_finite_losses
            self.mean_loss = mean + (loss / count - mean / count)

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON can hold them; what is not known has no field."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {
            name: encode_number(value) if isinstance(value, float) else value
            for name, value in fields.items()
            if value is not None
        }

    @classmethod
    def from_json(cls, fields: Any) -> Account:
        """What `as_json` was called on; ValueError for anything else."""
        if not isinstance(fields, dict):
            raise ValueError("an account is not an object")
        left = dict(cast("dict[str, Any]", fields))
        skipped = left.pop("skipped", None)
        if not isinstance(skipped, dict) or set(cast("dict[str, Any]", skipped)) != set(REASONS):
            raise ValueError(f"the skipped steps of an account are {skipped!r:.40}")
        own = dict(cast("dict[str, Any]", skipped))
        account = cls(skipped={reason: take_count(own, reason) for reason in REASONS})
        for item in dataclasses.fields(cls):
            if item.type == "int":
                setattr(account, item.name, take_count(left, item.name))
            elif item.name in left:
                setattr(account, item.name, decode_number(left.pop(item.name)))
        counts = [getattr(account, item.name) for item in dataclasses.fields(cls) if item.type == "int"]
        if min(*counts, *account.skipped.values()) < 0:
            raise ValueError("a count of an account is below 0")
        if left or account.applied + account.num_skipped != account.attempted:
            raise ValueError("an account does not add up")
        return account


@dataclass
class Accounts:
    """The account of the run, one of each epoch, and the last event."""

    run: Account = field(default_factory=Account)
    epochs: dict[int, Account] = field(default_factory=dict[int, Account])
    last_event: Event | None = None

    def add(self, record: Record) -> None:
        """Add the next record of the ledger."""
        if isinstance(record, Event):
            self.last_event = record
        if not isinstance(record, Step):
            return
        scale, before = record.numbers.get("scale"), self.run.scale
        reduced = scale is not None and before is not None and scale < before
        self.run.add(record, reduced=reduced)
        if "epoch" in record.counts:
            self.epochs.setdefault(record.counts["epoch"], Account()).add(record, reduced=reduced)
            if len(self.epochs) > MAX_EPOCHS:
                del self.epochs[next(iter(self.epochs))]

    def in_short(self) -> str:
        """Steps that were applied, and why others were not, in one line."""
        run = self.run
        reasons = "".join(f", {count:,} {reason}" for reason, count in run.skipped.items() if count)
        return f"{run.applied:,} of {run.attempted:,} steps applied{reasons}"

    def success(self) -> str:
        """The share of steps that were applied, rounded down: 100 % is said only where every step was."""
        run = self.run
        if not run.attempted:
            return "success rate unknown: no step yet"
        return f"success rate {run.applied * 10_000 // run.attempted / 100:.2f} %"

    def summary(self) -> str:
        """What happened, in five lines."""
        run = self.run
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in run.skipped.items() if count)
        return "\n".join(
            [
                f"{run.attempted:,} attempted, {run.applied:,} applied, {run.num_skipped:,} skipped"
                + (f" ({reasons})" if reasons else ""),
                "loss not recorded"
                if run.last_loss is None
                else f"loss {run.first_loss:.6g} first, {run.last_loss:.6g} last, "
                f"{run.num_nan_losses:,} NaN, {run.num_inf_losses:,} infinite",
                "scale not recorded"
                if run.scale is None
                else f"scale {run.scale:.6g} last, {run.lowest_scale:.6g} to {run.highest_scale:.6g}, "
                f"{run.num_scale_reductions:,} reductions",
                self.success(),
                f"last event: {self.last_event}" if self.last_event else "no events",
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """As it stands in the header of a part."""
        return {
            "run": self.run.as_json(),
            "epochs": [[epoch, account.as_json()] for epoch, account in self.epochs.items()],
            "last_event": encode_record(self.last_event) if self.last_event else None,
        }

    @classmethod
    def from_json(cls, fields: Any) -> Accounts:
        """What `as_json` was called on; ValueError for anything else."""
        try:
            last = fields["last_event"]
            event = None if last is None else decode_record(last)
            epochs = {
                take_count({"epoch": epoch}, "epoch"): Account.from_json(part) for epoch, part in fields["epochs"]
            }
            run = Account.from_json(fields["run"])
        except (KeyError, TypeError, AttributeError):
            raise ValueError("the accounts of a header cannot be read") from None
        if event is not None and not isinstance(event, Event):
            raise ValueError("the last event of a header is no event")
        return cls(run, epochs, event)


class Listener(Protocol):
    """Hears what the ledger hears, in the same order, on the training thread: it must not take long, or raise."""

    def begin(self, metadata: Mapping[str, Any]) -> None:
        """Hear what the run is; called once, before any record."""
        ...

    def take(self, record: Record, account: Account) -> None:
        """Hear of a step or an event, with the totals so far; they go on counting after the call."""
        ...

    def close(self) -> None:
        """Hear that the run is over."""
        ...
