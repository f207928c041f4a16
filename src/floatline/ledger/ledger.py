"""Ledger: what really happened, step by step, as JSON Lines on the disk."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floatline import __version__
from floatline.base.files import sync_folder
from floatline.causes import find_cause
from floatline.errors import LedgerError, suggest
from floatline.ledger.account import Accounts
from floatline.ledger.folder_lock import FolderLock
from floatline.ledger.history import History, read_history
from floatline.ledger.lines import EVENTS, LateValues, Mark, Number, Vector, check_packed, take_outcome, whole
from floatline.ledger.parts import (
    Header,
    PartWriter,
    add_up,
    check_sizes,
    list_parts,
    part_path,
    read_part,
)
from floatline.ledger.writer import LedgerWriter, Pace, PendingEvent, PendingStep

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor


class Ledger:
    """The account of a run, written while it trains. Make one with `create` or `resume`.

    `append` takes values and returns; a thread reads them, once the device has them, and writes. Calls from several
    threads are safe; the order of the calls is the order of the lines. A ledger belongs to the process that opened it.

    Attributes:
        folder: Where the parts lie.
        run_id: Name of the run.
        dropped_bytes: Length of the torn line that `resume` removed; 0 where there was none.
    """

    def __init__(
        self,
        lock: FolderLock,
        files: PartWriter,
        header: Header,
        *,
        dropped_bytes: int,
        pace: Pace,
    ) -> None:
        self.folder = files.path.parent
        self.run_id = header.run_id
        self.dropped_bytes = dropped_bytes
        self._lock = lock
        self._process = os.getpid()
        self._closed = False
        self._writer = LedgerWriter(
            files,
            header.before,
            make_header=lambda part, before: replace(header, part=part, before=before).encode(),
            pace=pace,
        )
        atexit.register(self.close)

    @classmethod
    def create(
        cls,
        folder: Path | str,
        *,
        run_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        part_bytes: int = 64 << 20,
        keep_parts: int | None = None,
        queue_steps: int = 1024,
        flush_lines: int = 64,
        flush_seconds: float = 1.0,
    ) -> Ledger:
        """Begin the ledger of a new run.

        Args:
            folder: The run folder; made where it is missing.
            run_id: Name of the run. None takes a random one.
            metadata: Anything JSON can hold; it stands in the header.
            part_bytes: Size at which a new file begins.
            keep_parts: Number of files to keep; older ones are deleted, their totals stay. None keeps all.
            queue_steps: Records that may wait for the thread; `append` waits when they do.
            flush_lines: Lines after which a batch goes to the operating system.
            flush_seconds: Time after which it goes at the latest.

        Raises:
            LedgerError: The folder holds a ledger, is in use, or cannot be written; or an option is out of range.
        """
        check_sizes(part_bytes, keep_parts)
        pace = Pace(queue_steps, flush_lines, flush_seconds)
        folder = Path(folder).absolute()  # the run may change its working directory
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        header = Header(run_id or uuid.uuid4().hex[:12], __version__, started, 0, dict(metadata or {}))
        try:
            line = header.encode()
            header = Header.decode(line)  # a copy, so that later parts say the same
        except (TypeError, ValueError) as error:
            raise LedgerError(f"The metadata cannot be written: {error}. Give what JSON can hold.") from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(folder)
            try:
                if list_parts(folder):
                    raise LedgerError(f"{folder} already holds a ledger. Use Ledger.resume, or choose another folder.")
                files = PartWriter(part_path(folder, 0), part_bytes=part_bytes, keep_parts=keep_parts, fresh=True)
                _begin(files, line)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise LedgerError(f"Run folder {folder} cannot be used: {error.strerror}. Choose another folder.") from None
        return cls(lock, files, header, dropped_bytes=0, pace=pace)

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        *,
        part_bytes: int = 64 << 20,
        keep_parts: int | None = None,
        queue_steps: int = 1024,
        flush_lines: int = 64,
        flush_seconds: float = 1.0,
    ) -> Ledger:
        """Go on with the ledger of a run that ended, or died.

        A torn last line is removed, to the byte, and a `resume` line says how many bytes it had. Steps go on
        counting where the last whole line stopped. The options are those of `create`.

        Raises:
            LedgerError: There is no ledger, it cannot be read, or another process writes it.
        """
        check_sizes(part_bytes, keep_parts)
        pace = Pace(queue_steps, flush_lines, flush_seconds)
        folder = Path(folder).absolute()  # the run may change its working directory
        if not folder.is_dir() or not list_parts(folder):
            raise LedgerError(f"There is no ledger in {folder}. Use Ledger.create.")
        try:
            lock = FolderLock(folder)
            try:
                files, header, dropped = _reopen(folder, part_bytes, keep_parts)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise LedgerError(f"Run folder {folder} cannot be used: {error.strerror}. Choose another folder.") from None
        ledger = cls(lock, files, header, dropped_bytes=dropped, pace=pace)
        ledger._writer.put(Mark("resume", _now(), dropped))
        try:
            ledger.flush()
        except LedgerError:
            with contextlib.suppress(LedgerError):
                ledger.close()
            raise
        return ledger

    @staticmethod
    def read(path: Path | str) -> History:
        """Read a run folder, or one file of it, as columns; also while it is being written."""
        return read_history(path)

    def append(
        self,
        *,
        applied: bool | Tensor | None = None,
        reason: str | Tensor | None = None,
        cause: str | None = None,
        epoch: int | None = None,
        batch: int | None = None,
        micro_batches: int | None = None,
        loss: Number | None = None,
        scale: Number | None = None,
        grad_norm: Number | None = None,
        lost_share: Number | None = None,
        lr: Number | None = None,
        loss_score: Number | None = None,
        norm_score: Number | None = None,
        layer_norms: Mapping[str, Number] | Vector | None = None,
        packed: Vector | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        """Record one attempted step, with the values as they are now.

        Numbers may be one-element tensors. Those on a CUDA device are copied behind the stream and read by the
        thread: no host sync here.

        Args:
            applied: Whether the optimizer took the step. None: it did, unless there is a reason.
            reason: Why it did not, one of REASONS; needed unless `applied` is true. Where `applied` is a tensor:
                why it did not if it did not. As a tensor: 0 for applied, else the place in REASONS from 1.
            cause: Id of the cause, where it is known.
            epoch: Epoch, as the caller counts it.
            batch: Batch within the epoch.
            micro_batches: Batches whose gradients were summed into this step.
            loss: Unscaled loss, as it was.
            scale: Loss scale this step used.
            grad_norm: Global norm of the unscaled gradients, before clipping.
            lost_share: Share of gradient elements that rounded to zero.
            lr: Learning rate.
            loss_score: Outlier score of the loss.
            norm_score: Outlier score of the norm.
            layer_norms: Norm by layer name; or names and a 1-D tensor, copied at once.
            packed: Names of numbers, 'applied' or 'reason', and a 1-D tensor that holds them, copied at once.
            ranks: Processes for which the step was skipped.

        Raises:
            LedgerError: The record contradicts itself, the ledger is closed, or what was appended before cannot be
                written. The record of a call that raises is not taken.
        """
        self._check_process()
        numbers: dict[str, Number | None] = {
            "loss": loss,
            "scale": scale,
            "grad_norm": grad_norm,
            "lost_share": lost_share,
            "lr": lr,
            "loss_score": loss_score,
            "norm_score": norm_score,
        }
        places = {"epoch": epoch, "batch": batch, "micro_batches": micro_batches}
        counts = {name: whole(name, value) for name, value in places.items() if value is not None}
        if packed is not None:
            check_packed(packed[0], numbers, applied, reason)
        late = packed[0] if packed is not None else ()
        text = take_outcome(applied, reason, late, numbers)
        if cause is not None:
            find_cause(cause)
        norms = None
        if isinstance(layer_norms, tuple):
            norms = LateValues({}, [layer_norms])
        elif layer_norms is not None:
            norms = LateValues(layer_norms)
        values = LateValues(numbers, () if packed is None else [packed])
        self._writer.put(PendingStep(_now(), values, text, cause, counts, norms, tuple(ranks)))

    def event(
        self,
        event: str,
        message: str = "",
        *,
        epoch: int | None = None,
        batch: int | None = None,
        values: Mapping[str, Number] | None = None,
    ) -> None:
        """Record something that happened besides a step: a rollback, a cut of the learning rate, a stop, a note.

        Args:
            event: One of EVENTS. All but 'evaluation', 'scale-change' and 'note' are synced to the disk at once.
            message: What happened, in words.
            epoch: None takes the epoch of the last step.
            batch: None takes the batch of the last step.
            values: Numbers that belong to it, such as the step that a rollback went back to.
        """
        self._check_process()
        if event not in EVENTS:
            raise LedgerError(f"Event {event!r} is not known. {suggest(event, EVENTS)}")
        places = [None if value is None else whole("place", value) for value in (epoch, batch)]
        self._writer.put(PendingEvent(_now(), event, str(message), places[0], places[1], LateValues(values or {})))

    def flush(self) -> None:
        """Wait until everything appended so far is on the disk, synced; tries again what failed before."""
        self._check_process()
        self._check_open()
        self._writer.flush()

    def accounts(self) -> Accounts:
        """Totals of everything appended so far, in all and per epoch; waits for the device, not for the disk."""
        self._check_process()
        return self._writer.accounts if self._closed else self._writer.snapshot()

    def summary(self) -> str:
        """What happened, in five lines; waits for the device."""
        return self.accounts().summary()

    def close(self) -> None:
        """Write and sync everything and give the folder back; raises where lines could not be written."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._writer.stop()
        finally:
            self._lock.release()

    def __enter__(self) -> Ledger:
        """The ledger itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LedgerError("The ledger is closed. Use Ledger.resume to go on.")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise LedgerError(
                f"The ledger was opened by process {self._process}, and this is its child {os.getpid()}. "
                f"Append in the process that opened it."
            )


def _begin(files: PartWriter, header: bytes) -> None:
    """Write the first line of a ledger; leaves no file behind where that fails."""
    try:
        files.add(header)
        files.sync()
        sync_folder(files.path.parent)
    except OSError:
        files.close()
        files.path.unlink()
        raise


def _reopen(folder: Path, part_bytes: int, keep_parts: int | None) -> tuple[PartWriter, Header, int]:
    """The last part, ready to be appended to, with the accounts up to its end and the bytes of its torn line."""
    paths = list_parts(folder)
    part = read_part(paths[-1])
    dropped = part.dropped_bytes
    if part.header is None and len(paths) > 1:  # the writer died while it began this part
        paths[-1].unlink()
        part = read_part(paths[-2])
    accounts = add_up(part, None)
    if part.header is None:
        raise LedgerError(f"{part.path} holds no whole header line. Delete it and use Ledger.create.")
    if part.dropped_bytes:
        with part.path.open("r+b") as file:
            file.truncate(part.kept_bytes)
            os.fsync(file.fileno())
    files = PartWriter(part.path, part_bytes=part_bytes, keep_parts=keep_parts, fresh=False)
    return files, replace(part.header, before=accounts), dropped


def _now() -> float:
    return round(time.time(), 6)
