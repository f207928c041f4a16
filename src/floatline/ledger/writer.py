"""The thread that reads late values and writes the ledger, so that the training thread does neither."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from floatline.errors import LedgerError
from floatline.ledger.account import Accounts
from floatline.ledger.lines import EVENTS, REASONS, Event, LateValues, Mark, Record, Step, encode_line, encode_record
from floatline.ledger.parts import PartWriter


@dataclass(frozen=True)
class Pace:
    """How many records may wait, and how many lines or seconds make a batch."""

    queue_steps: int
    flush_lines: int
    flush_seconds: float

    def __post_init__(self) -> None:
        for name, value in (("queue_steps", self.queue_steps), ("flush_lines", self.flush_lines)):
            if value < 1:
                raise LedgerError(f"{name} is {value}. Give 1 or more.")
        if not 0 < self.flush_seconds < 86_400:
            raise LedgerError(f"flush_seconds is {self.flush_seconds}. Give a time above 0 and below a day.")


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step as the training thread gave it."""

    time: float
    values: LateValues
    reason: str | None
    cause: str | None
    counts: dict[str, int]
    layer_norms: LateValues | None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event as the training thread gave it."""

    time: float
    event: str
    message: str
    epoch: int | None
    batch: int | None
    values: LateValues


@dataclass(slots=True)
class _Request:
    """Something the writer does once everything before it is taken."""

    action: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)


class LedgerWriter:
    """Takes records from a bounded queue, in order, and writes them in batches.

    The queue never drops: `put` waits while it is full. A failure to write keeps the lines in memory, is raised by
    the next call of the training thread, and `flush` tries again.
    """

    def __init__(
        self,
        files: PartWriter,
        accounts: Accounts,
        *,
        make_header: Callable[[int, Accounts], bytes],
        pace: Pace,
    ) -> None:
        self.accounts = accounts
        self._files, self._make_header = files, make_header
        self._pace = pace
        self._queue: queue.Queue[PendingStep | PendingEvent | Mark | _Request] = queue.Queue(pace.queue_steps)
        self._place: dict[str, int] = {}  # epoch and batch of the last step
        self._num_batched = 0
        self._due: float | None = None
        self._write_error: OSError | None = None  # can be tried again
        self._lost: str = ""  # cannot
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="floatline-ledger", daemon=True)
        self._thread.start()

    def put(self, item: PendingStep | PendingEvent | Mark) -> None:
        """Queue a record; waits while the queue is full."""
        self.check()
        self._queue.put(item)

    def check(self) -> None:
        """Raise what went wrong on the thread, in one line."""
        if self._stopped:
            raise LedgerError("The ledger is closed. Use Ledger.resume to go on.")
        if self._lost:
            raise LedgerError(self._lost)
        error = self._write_error
        if error is not None:
            raise LedgerError(
                f"The ledger cannot be written to {self._files.path}: {error.strerror or error}. "
                f"{self._files.num_waiting_lines:,} lines wait in memory: make room and call flush()."
            )

    def flush(self) -> None:
        """Wait until everything put so far is on the disk."""
        self._ask(self._retry_and_sync)
        self.check()

    def snapshot(self) -> Accounts:
        """The accounts of everything put so far; waits for the device, not for the disk."""
        taken: list[Accounts] = []
        self._ask(lambda: taken.append(copy.deepcopy(self.accounts)))
        return taken[0]

    def stop(self) -> None:
        """Flush and end the thread; raises what could not be written."""
        if not self._lost:
            self._queue.put(Mark("end", round(time.time(), 6)))
        self._ask(self._retry_and_sync)
        self._ask(self._end)
        self._thread.join()
        self._files.close()
        if self._write_error is not None:
            raise LedgerError(
                f"The ledger was closed, but {self._files.num_waiting_lines:,} lines are not on the disk: "
                f"{self._files.path}: {self._write_error.strerror or self._write_error}."
            )
        if self._lost:
            raise LedgerError(self._lost)

    def _ask(self, action: Callable[[], None]) -> None:
        request = _Request(action)
        self._queue.put(request)
        request.done.wait()

    def _run(self) -> None:
        while not self._stopped:
            try:
                wait = None if self._due is None else max(0.0, self._due - time.monotonic())
                item = self._queue.get(timeout=wait)
            except queue.Empty:
                self._write()
                continue
            try:
                if isinstance(item, _Request):
                    item.action()
                elif not self._lost:  # what follows a lost step would be numbered wrongly
                    self._take(item)
            except Exception as error:  # the thread must live, and the training thread must hear of it
                after, text = self.accounts.run.attempted, " ".join(str(error).split())
                self._lost = f"The ledger lost what followed step {after:,}: {text}. Stop the run."
            finally:
                if isinstance(item, _Request):
                    item.done.set()

    def _take(self, item: PendingStep | PendingEvent | Mark) -> None:
        """Read a record's values, add it to the accounts and queue its line."""
        record = self._resolve(item)
        line = encode_line(encode_record(record))
        if not self._files.has_room(line):
            self._files.begin_part(self._make_header(self._files.part + 1, self.accounts))
        self.accounts.add(record)
        self._files.add(line)
        self._num_batched += 1
        if isinstance(record, Step):
            self._place = record.counts
        now = time.monotonic()
        if self._due is None:
            self._due = now + self._pace.flush_seconds
        if isinstance(record, Event) and EVENTS[record.event]:
            self._write(sync=True)
        elif now >= self._due or self._num_batched >= self._pace.flush_lines:
            self._write()

    def _resolve(self, item: PendingStep | PendingEvent | Mark) -> Record:
        attempted = self.accounts.run.attempted
        if isinstance(item, Mark):
            return item
        if isinstance(item, PendingEvent):
            epoch = self._place.get("epoch") if item.epoch is None else item.epoch
            batch = self._place.get("batch") if item.batch is None else item.batch
            return Event(item.event, attempted, item.time, item.message, epoch, batch, item.values.read())
        numbers: dict[str, Any] = item.values.read()
        code, applied = numbers.pop("reason", None), numbers.pop("applied", None)
        reason = item.reason
        if code is not None:
            if code not in range(len(REASONS) + 1):
                raise ValueError(f"the reason read from the device is {code:g}, not 0 to {len(REASONS)}")
            reason = REASONS[int(code) - 1] if code else None
        elif applied is not None:
            if applied not in (0, 1):
                raise ValueError(f"applied, read from the device, is {applied:g}, not 0 or 1")
            reason = None if applied else reason
        norms = None if item.layer_norms is None else item.layer_norms.read()
        cause = item.cause if reason is not None else None
        return Step(attempted + 1, item.time, reason is None, reason, cause, item.counts, numbers, norms, item.ranks)

    def _write(self, *, sync: bool = False) -> None:
        """Hand the lines to the operating system, unless that failed and nobody has asked to try again."""
        self._due, self._num_batched = None, 0
        if self._write_error is not None:
            return
        try:
            if sync:
                self._files.sync()
            else:
                self._files.drain()
        except OSError as error:
            self._write_error = error

    def _end(self) -> None:
        self._stopped = True

    def _retry_and_sync(self) -> None:
        self._write_error = None
        self._write(sync=True)
