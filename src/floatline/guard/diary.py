"""The diary of a run: every outcome in the accounts and the ledger of its folder, and single lines on stderr."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from floatline.errors import GuardError, LedgerError
from floatline.guard.outcome import Outcome
from floatline.ledger.account import Accounts, Listener
from floatline.ledger.ledger import Ledger
from floatline.ledger.lines import Event, Record, Step
from floatline.optim.mesh import num_processes


class Diary:
    """Keeps the account of a run. Process 0 writes the ledger; the accounts are the same on every process.

    A ledger that cannot be written does not raise here, in the middle of a step: `check` does, behind it. What the
    ledger did not take waits in memory, and goes to it first as soon as it takes records again.

    Args:
        folder: Run folder; None keeps the accounts in memory only.
        resume: Go on with the ledger in the folder.
        metadata: For the ledger's header.
        group: Processes that train together; None is the default group.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        resume: bool,
        metadata: dict[str, Any],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.accounts = Accounts()
        self.diagnosed_by = what_to_run()  # a command that knows its target says so
        self.folder = None if folder is None else Path(folder)
        self.ledger: Ledger | None = None
        self._attempt = 0
        self._metadata = metadata
        self._writes = is_first_process(group)
        self._listeners: list[Listener] = []
        self._held: deque[Callable[[], None]] = deque()
        self._failure: LedgerError | None = None
        if self.folder is None and resume:
            raise GuardError("resume=True without a folder. Give the run folder whose ledger goes on.")
        if self.folder is not None and self._writes:
            self.ledger = Ledger.resume(self.folder) if resume else Ledger.create(self.folder, metadata=metadata)

    def attach(self, listener: Listener) -> None:
        """Send every record from here on to a listener; on process 0 only, which speaks for all."""
        if self._writes:
            listener.begin(self._metadata)
            self._listeners.append(listener)

    def _tell(self, record: Record) -> None:
        """Last of all: a listener may raise."""
        for listener in self._listeners:
            listener.take(record, self.accounts.run)

    def write(self, outcome: Outcome, *, lost: float | None = None) -> None:
        """Add one outcome; waits for the device if it is not there yet."""
        self._attempt = outcome.attempt
        numbers = {name: value for name, value in outcome.numbers.items() if name != "reason"}
        # A score that is not known has no field.
        numbers = {n: v for n, v in numbers.items() if not (n.endswith("_score") and math.isnan(v))}
        if outcome.lr is not None:
            numbers["lr"] = outcome.lr
        if lost is not None:
            numbers["lost_share"] = lost
        counts = {"epoch": outcome.epoch, "batch": outcome.batch, "micro_batches": outcome.micro_batches}
        known = {name: value for name, value in counts.items() if value is not None}
        norms = outcome.layer_norms
        when, ranks = time.time(), outcome.ranks
        record = Step(outcome.attempt, when, outcome.applied, outcome.reason, None, known, numbers, norms, ranks)
        self.accounts.add(record)
        if self.ledger is not None:
            self._hand_over(
                self.ledger.append,
                applied=outcome.applied,
                reason=outcome.reason,
                epoch=outcome.epoch,
                batch=outcome.batch,
                micro_batches=outcome.micro_batches,
                loss=numbers["loss"],
                scale=numbers["scale"],
                grad_norm=numbers["grad_norm"],
                lost_share=numbers.get("lost_share"),
                lr=numbers.get("lr"),
                loss_score=numbers.get("loss_score"),
                norm_score=numbers.get("norm_score"),
                layer_norms=norms,
                ranks=ranks,
            )
        self._tell(record)

    def note(self, event: str, message: str, **values: float) -> None:
        """Add something that happened besides a step: a rollback, an escalation, a stop."""
        record = Event(event, self._attempt, time.time(), message, values=dict(values))
        self.accounts.add(record)
        if self.ledger is not None:
            self._hand_over(self.ledger.event, event, message, values=values)
        self._tell(record)

    def _hand_over(self, call: Callable[..., None], *args: Any, **values: Any) -> None:
        """Give the ledger a record, behind those that it has not taken yet."""
        self._held.append(partial(call, *args, **values))
        self._catch_up()

    def _catch_up(self) -> None:
        try:
            while self._held:
                self._held[0]()
                self._held.popleft()
        except LedgerError as error:
            self._failure = error

    def check(self) -> None:
        """Raise why the ledger cannot be written, where it cannot; once for each record."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def flush(self) -> None:
        """Wait until everything is on the disk; tries again what failed before."""
        if self.ledger is None:
            return
        self._failure = None
        self.ledger.flush()
        if self._held:
            self._catch_up()
            self.check()
            self.ledger.flush()

    def close(self) -> None:
        """Write what is left, and let go of the folder and of all who listen."""
        try:
            if self._held:
                with contextlib.suppress(LedgerError):  # closing says it
                    self.flush()
            if self.ledger is not None:
                self.ledger.close()
        finally:
            for listener in self._listeners:
                listener.close()
            self._listeners.clear()


def is_first_process(group: dist.ProcessGroup | None) -> bool:
    """Whether this process writes what all processes of the group share."""
    return num_processes(group) == 1 or dist.get_rank(group) == 0


def say(line: str) -> None:
    """Print one line, safe for a terminal whatever it holds."""
    words = "".join(letter if letter.isprintable() else " " for letter in f"floatline: {line}")
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def what_to_run() -> str:
    """The command that finds out why steps fail, for the script that runs here."""
    script = Path(sys.argv[0]).name if sys.argv and sys.argv[0].endswith(".py") else "train.py"
    return f"floatline diagnose -- python {script}"
