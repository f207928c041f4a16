"""Follower: a ledger read as it grows, each time only what is new."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

from floatline.base.files import read_bounded
from floatline.errors import LedgerError
from floatline.ledger.account import Accounts
from floatline.ledger.lines import MAX_LINE, Record, Step, decode_line, decode_record
from floatline.ledger.parts import Header, list_parts, part_path

_MARK = 256  # bytes


class Follower:
    """Where reading stands in a run folder, and the totals up to there.

    Nothing is locked and nothing in the files is executed: the run that writes them does not notice. A line that is
    not whole yet is read next time.

    Attributes:
        folder: The run folder.
        header: Run id, start and metadata, from the newest part that was begun; None before the first `read`.
        accounts: Totals of the whole run, also of parts that were deleted, and per epoch.
        num_missed: Steps that were in parts deleted before they were read; they are in the totals only.
        num_restarts: How often another run was found in the folder; everything else is then that run's.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.num_restarts = 0
        self._forget()

    def _forget(self) -> None:
        self.header: Header | None = None
        self.accounts = Accounts()
        self.num_missed = 0
        self._part: int | None = None
        self._place = 0  # bytes of whole lines that are read
        self._line = 0
        self._mark = b""  # how the part begins, with run id and start: another file may get the same name

    def read(self) -> Generator[Record]:
        """The records since the last call, in order.

        Raises:
            LedgerError: There is no ledger, a line cannot be read, or lines are missing.
        """
        while True:
            part = self._choose_part()
            # Looked for first: a part is begun only when the one before it is whole.
            following = _has_header(part_path(self.folder, part + 1))
            try:
                other_run = yield from self._read_part(part)
            except FileNotFoundError:
                continue  # deleted just now
            except OSError as error:
                path = part_path(self.folder, part)
                raise LedgerError(f"{path} cannot be read: {error.strerror}. Give a run folder.") from None
            if other_run:
                self._forget()
                self.num_restarts += 1
            elif following:
                self._part, self._place, self._line, self._mark = part + 1, 0, 0, b""
            else:
                return

    def _choose_part(self) -> int:
        """The part to go on with: the one that was read last, or the oldest that is left."""
        if self._part is not None and part_path(self.folder, self._part).exists():
            return self._part
        paths = list_parts(self.folder) if self.folder.is_dir() else []
        if not paths:
            raise LedgerError(f"There is no ledger in {self.folder}. Give a run folder, such as runs/NAME.")
        oldest = int(paths[0].stem.removeprefix("ledger-"))
        if self._part is not None and oldest < self._part:
            self._forget()
            self.num_restarts += 1
        self._part, self._place, self._line, self._mark = oldest, 0, 0, b""
        return oldest

    def _read_part(self, part: int) -> Generator[Record, None, bool]:
        """The new lines of a part; returns True where the part is that of another run."""
        path = part_path(self.folder, part)
        if path.exists() and not path.is_file():
            raise LedgerError(f"{path} is no plain file. Give a run folder.")  # a pipe would be waited for without end
        with path.open("rb") as file:
            mark = file.read(_MARK)
            if os.fstat(file.fileno()).st_size < self._place or not mark.startswith(self._mark):
                return True
            file.seek(self._place)
            while line := file.readline(MAX_LINE + 1):
                if not line.endswith(b"\n") and len(line) <= MAX_LINE:
                    break  # still being written, or torn: the writer died within it
                record = self._take(line)
                self._place += len(line)
                if record is not None:
                    yield record
        return False

    @property
    def _where(self) -> str:
        return f"{part_path(self.folder, self._part or 0)}:{self._line}"

    def _take(self, line: bytes) -> Record | None:
        """One line into the totals; None for a header."""
        self._line += 1
        try:
            if len(line) > MAX_LINE:
                raise ValueError(f"the line is longer than {MAX_LINE:,} bytes")
            if self._line == 1:
                self._take_header(Header.decode(line))
                self._mark = line[:_MARK]
                return None
            record = decode_record(decode_line(line))
        except (ValueError, OverflowError) as error:
            reason = str(error) if not hasattr(error, "msg") else f"not JSON ({error})"
            raise LedgerError(f"{self._where}: {reason}. Give a ledger that floatline wrote.") from None
        if isinstance(record, Step) and record.attempt != self.accounts.run.attempted + 1:
            raise LedgerError(
                f"{self._where}: step {record.attempt:,} follows step "
                f"{self.accounts.run.attempted:,}. Lines are missing."
            )
        self.accounts.add(record)
        return record

    def _take_header(self, header: Header) -> None:
        if self.header is not None and header.run_id != self.header.run_id:
            raise ValueError(f"it belongs to run {header.run_id!r:.40}, not to {self.header.run_id!r:.40}")
        self.num_missed += max(0, header.before.run.attempted - self.accounts.run.attempted)
        self.header, self.accounts = header, header.before


def _has_header(path: Path) -> bool:
    """Whether a part has begun: its writer may have died before the first line was whole."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.readline(MAX_LINE + 1).endswith(b"\n")
    except OSError:
        return False


def is_writer_alive(folder: Path) -> bool | None:
    """Whether the process that wrote the ledger last still runs; None where that cannot be told from here.

    The lock file names process and machine. The lock itself is not tried: for a moment that would keep the run's own
    process out.
    """
    if sys.platform == "win32":
        return None  # there is no call that only asks
    import socket

    try:
        words = read_bounded(folder / "ledger.lock", most=4096).decode(errors="replace").split()
    except OSError:
        return None
    if len(words) != 4 or not words[1].isdigit() or words[3] != socket.gethostname():
        return None
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return None  # another user's: it is there, or its number was given to someone else
    return True
