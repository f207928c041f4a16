"""Logger: the records of a run on their way to another tool, on a thread of its own."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import math
import queue
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from floatline.errors import FormatError, GuardError
from floatline.formats import Format, find_format
from floatline.ledger.account import Account
from floatline.ledger.lines import Event, Mark, Record, Step

PREFIX = "floatline/"


def values_of(step: Step, account: Account, fmt: Format | None) -> dict[str, float]:
    """Everything of a step that is a number.

    Numerics:
        The ledger's numbers as they are. `skipped`, and `skipped_REASON` from the first of its kind on, are totals of
        the run: they are true however seldom a row is logged. `headroom` is how often the largest element of any
        gradient can double at least: log2(max / norm x scale x micro-batches) of the layer nearest to the ceiling,
        -inf where a norm is not finite. It is there where norms by layer were recorded and the format is known.

    Args:
        step: The step.
        account: Totals of the run, with it.
        fmt: The format of the plan; None where it is not known.
    """
    values = dict(step.numbers)
    if "epoch" in step.counts:
        values["epoch"] = step.counts["epoch"]
    values["skipped"] = account.num_skipped
    values |= {f"skipped_{reason.replace('-', '_')}": count for reason, count in account.skipped.items() if count}
    norms = step.layer_norms or {}
    values |= {f"layer_norm/{name}": norm for name, norm in norms.items()}
    if norms and fmt is not None:
        held = step.numbers.get("scale", 1.0) * step.counts.get("micro_batches", 1)
        highest = max(norm * held if math.isfinite(norm) else math.inf for norm in norms.values())
        values["headroom"] = math.log2(fmt.max / highest) if 0 < highest < math.inf else -math.inf
        if highest == 0:
            del values["headroom"]
    return {f"{PREFIX}{name}": float(value) for name, value in values.items()}


def describe_format(metadata: Mapping[str, Any]) -> Format | None:
    """The format that the plan in the metadata computes in; None where there is none."""
    plan = plan_of(metadata)
    try:
        return find_format(plan["compute"]) if "compute" in plan else None
    except FormatError:
        return None


def plan_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The plan in the metadata; empty where there is none."""
    plan = metadata.get("plan")
    return cast("dict[str, Any]", plan) if isinstance(plan, dict) else {}


_MOST_WAITING = 10_000
_MOST_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Row:
    """What is logged at one step.

    Args:
        step: The attempted step, counted from 1 as the ledger does.
        values: Numbers by full name, such as 'floatline/scale'. NaN and infinity are as they were.
        text: Something that happened, in words; '' where nothing did.
    """

    step: int
    values: dict[str, float] = field(default_factory=dict[str, float])
    text: str = ""


class Logger(ABC):
    """Sends a guard's records to one tool: `guard.attach(logger)`.

    The guard hands over what it has read anyway, some steps late: nothing here waits for the device. A thread sends
    it. Training never waits for the tool: where it is too slow or fails, rows are left out, counted and warned of; the
    ledger has them all.

    Args:
        every: Steps between two rows. The first step, the last, each skipped one, and those with norms by layer have a
            row in any case.

    Attributes:
        num_left_out: Rows that the tool did not get.
    """

    def __init__(self, *, every: int = 10) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GuardError(f"every is {every!r}. Give a number of steps from 1 up.")
        self.num_left_out = 0
        self._every = every
        self._format: Any = None
        self._unsent: tuple[Step, Account] | None = None  # the newest step, where it had no row
        self._warned = self._closed = False
        self._queue: queue.Queue[Row | Mapping[str, Any] | threading.Event | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def begin(self, metadata: Mapping[str, Any]) -> None:
        """Take what the run is: its plan. The guard calls it."""
        self._format = describe_format(metadata)
        self._put(dict(metadata))

    def take(self, record: Record, account: Account) -> None:
        """Take a record of the run and its totals so far. The guard calls it."""
        if isinstance(record, Event):
            message = f"{record.event}: {record.message}" if record.message else record.event
            self.note(record.attempt, message)
        if isinstance(record, Event | Mark):
            return
        due = record.attempt % self._every == 0 or record.attempt == 1
        if due or not record.applied or record.layer_norms:
            self._unsent = None
            self._put(Row(record.attempt, values_of(record, account, self._format)))
        else:
            self._unsent = record, account

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of your own, by their full names.

        Args:
            step: The step they belong to.
            values: Numbers by name, such as {'val/loss': 2.1}.
        """
        self._put(Row(step, {name: float(value) for name, value in values.items()}))

    def note(self, step: int, text: str) -> None:
        """Log something that happened, in words."""
        self._put(Row(step, text=text))

    def flush(self) -> None:
        """Wait until the tool has everything so far."""
        if self._thread is None or self._closed:
            return
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Send what is left, and let go of the tool; a second call does nothing."""
        if self._closed:
            return
        if self._unsent is not None:
            step, account = self._unsent
            self._put(Row(step.attempt, values_of(step, account, self._format)))
        self._closed = True
        atexit.unregister(self.close)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        try:
            self._finish()
        except Exception as error:
            self._complain(error)
        if self.num_left_out:
            warnings.warn(
                f"{type(self).__name__} left out {self.num_left_out:,} rows. The ledger has them all.",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Logger:
        """The logger itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def _send(self, rows: Sequence[Row]) -> None:
        """Give the rows to the tool, in order; on the thread."""

    @abstractmethod
    def _describe(self, metadata: Mapping[str, Any]) -> None:
        """Give the tool what the run is; on the thread."""

    @abstractmethod
    def _finish(self) -> None:
        """Let go of the tool."""

    def _put(self, item: Row | Mapping[str, Any]) -> None:
        if self._closed:
            raise GuardError(f"The {type(self).__name__} is closed. Make another.")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="floatline-logger", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.num_left_out += 1

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            waiting = [item]
            with contextlib.suppress(queue.Empty):
                while len(waiting) < _MOST_AT_ONCE:
                    waiting.append(self._queue.get_nowait())
            if self._handle(waiting):
                return

    def _handle(self, items: list[Row | Mapping[str, Any] | threading.Event | None]) -> bool:
        """Send the rows that stand together; returns whether it was the end."""
        rows: list[Row] = []
        for item in (*items, threading.Event()):  # the last one sends what is left
            if isinstance(item, Row):
                rows.append(item)
                continue
            self._try_send(rows)
            rows = []
            if item is None:
                return True
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._describe(item)
            except Exception as error:
                self._complain(error)
        return False

    def _try_send(self, rows: list[Row]) -> None:
        if not rows:
            return
        try:
            self._send(rows)
        except Exception as error:  # whatever the tool raises, the run goes on
            self.num_left_out += len(rows)
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        """Warn once: a tool that is away would say the same at every step."""
        if self._warned:
            return
        self._warned = True
        text = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(
            f"{type(self).__name__} cannot log: {text[:300]}. The run and its ledger go on.",
            RuntimeWarning,
            stacklevel=2,
        )


def load_package(module: str, *, package: str, user: str) -> Any:
    """A tool's module; GuardError with what to install where it is not there."""
    if importlib.util.find_spec(package) is None:
        raise GuardError(f"{user} needs {package}. Install it with: pip install {package}.")
    return importlib.import_module(module)
