"""History: a ledger read back, as columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floatline.errors import LedgerError, suggest
from floatline.ledger.account import Account, Accounts
from floatline.ledger.lines import COUNTS, NUMBERS, Event, Mark, Record, Step
from floatline.ledger.parts import Header, add_up, list_parts, read_part

if TYPE_CHECKING:
    import numpy as np

COLUMNS = ("attempt", "time", "applied", "reason", "cause", *COUNTS, *NUMBERS, "layer_norms", "ranks")


@dataclass
class History:
    """What a ledger holds: one list per field, all of the same length; None where a step did not record it.

    Attributes:
        header: Run id, version, start and metadata, from the first part that is there.
        accounts: Totals of the whole run, also of parts that were deleted, and per epoch.
        events: Rollbacks, cuts, notes, in order.
        dropped_bytes: Length of the torn line at the end, which was left out; 0 where there is none.
        num_resumes: How often writing began again.
        ended: Whether the ledger was closed in order.
    """

    header: Header
    accounts: Accounts
    dropped_bytes: int = 0
    num_resumes: int = 0
    ended: bool = False
    events: list[Event] = field(default_factory=list[Event])
    attempt: list[int] = field(default_factory=list[int])
    time: list[float] = field(default_factory=list[float])
    applied: list[bool] = field(default_factory=list[bool])
    reason: list[str | None] = field(default_factory=list["str | None"])
    cause: list[str | None] = field(default_factory=list["str | None"])
    epoch: list[int | None] = field(default_factory=list["int | None"])
    batch: list[int | None] = field(default_factory=list["int | None"])
    micro_batches: list[int | None] = field(default_factory=list["int | None"])
    loss: list[float | None] = field(default_factory=list["float | None"])
    scale: list[float | None] = field(default_factory=list["float | None"])
    grad_norm: list[float | None] = field(default_factory=list["float | None"])
    lost_share: list[float | None] = field(default_factory=list["float | None"])
    lr: list[float | None] = field(default_factory=list["float | None"])
    loss_score: list[float | None] = field(default_factory=list["float | None"])
    norm_score: list[float | None] = field(default_factory=list["float | None"])
    layer_norms: list[dict[str, float] | None] = field(default_factory=list["dict[str, float] | None"])
    ranks: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    @property
    def epochs(self) -> dict[int, Account]:
        """The account of each epoch."""
        return self.accounts.epochs

    def summary(self) -> str:
        """What happened, in five lines."""
        return self.accounts.summary()

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A column as a numpy array.

        Numerics:
            Numbers and counts are float64 and exact up to 2**53. A value that was not recorded is NaN here, as a
            recorded NaN is; the list tells them apart.
        """
        import numpy as np

        if name not in COLUMNS:
            raise LedgerError(f"The ledger has no column {name!r}. {suggest(name, COLUMNS)}")
        values: list[Any] = getattr(self, name)
        if name == "applied":
            return np.array(values, dtype=bool)
        if name in ("reason", "cause", "layer_norms", "ranks"):
            column = np.empty(len(values), dtype=object)
            column[:] = values
            return column
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    def __len__(self) -> int:
        """Steps that are read."""
        return len(self.attempt)

    def _add(self, record: Record) -> None:
        if isinstance(record, Mark):
            self.ended = record.kind == "end"
            self.num_resumes += record.kind == "resume"
            return
        self.ended = False
        if isinstance(record, Event):
            self.events.append(record)
            return
        self._add_step(record)

    def _add_step(self, step: Step) -> None:
        for name in ("attempt", "time", "applied", "reason", "cause", "layer_norms", "ranks"):
            getattr(self, name).append(getattr(step, name))
        for name in COUNTS:
            getattr(self, name).append(step.counts.get(name))
        for name in NUMBERS:
            getattr(self, name).append(step.numbers.get(name))


def read_history(path: Path | str) -> History:
    """Read a run folder, or one part of a ledger; a ledger that is being written can be read too.

    Nothing in the file is executed. A torn last line is left out and counted.

    Raises:
        LedgerError: There is no ledger, a line cannot be read, or lines are missing.
    """
    path = Path(path)
    paths = list_parts(path) if path.is_dir() else [path]
    if not paths:
        raise LedgerError(f"There is no ledger in {path}. Give a run folder, or a file such as ledger-00000.jsonl.")
    history: History | None = None
    for place in paths:
        part = read_part(place)
        last = place == paths[-1]
        if part.dropped_bytes and not last:
            raise LedgerError(f"{place} is cut off in mid-line, and parts follow it. Restore it from a copy.")
        if part.header is None and history is not None and last:
            history.dropped_bytes = part.dropped_bytes  # the writer died while it began this part
            break
        accounts = add_up(part, history.accounts if history else None)
        if part.header is None:
            break
        if history is None:
            history = History(part.header, accounts)
        elif history.header.run_id != part.header.run_id:
            raise LedgerError(
                f"{place} belongs to run {part.header.run_id!r:.40}, not to {history.header.run_id!r:.40}. "
                f"Separate them."
            )
        history.dropped_bytes = part.dropped_bytes
        for record in part.records:
            history._add(record)  # pyright: ignore[reportPrivateUsage]
    if history is None:
        raise LedgerError(f"There is no ledger in {path}. Give a run folder, or a file such as ledger-00000.jsonl.")
    return history
