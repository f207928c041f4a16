"""The files of a ledger: the header of a part, reading parts back, and writing them so that nothing is lost."""

from __future__ import annotations

import itertools
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floatline.base.files import sync_folder
from floatline.errors import LedgerError
from floatline.ledger.account import Accounts
from floatline.ledger.lines import MAX_LINE, SCHEMA, Record, Step, decode_line, decode_record, encode_line


@dataclass(frozen=True)
class Header:
    """The first line of a part: whose it is, and what the run came to before it."""

    run_id: str
    version: str
    started: str
    part: int
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    before: Accounts = field(default_factory=Accounts)

    def encode(self) -> bytes:
        """As a line."""
        fields = {name: getattr(self, name) for name in ("run_id", "version", "started", "part", "metadata")}
        return encode_line({"kind": "header", "schema": SCHEMA, **fields, "before": self.before.as_json()})

    @classmethod
    def decode(cls, line: bytes) -> Header:
        """From a line; ValueError where it is no header of this schema."""
        fields = decode_line(line)
        if fields.get("kind") != "header":
            raise ValueError("a ledger begins with a header line, and this is none")
        if fields.get("schema") != SCHEMA:
            raise ValueError(f"it has schema {fields.get('schema')!r:.40} and this floatline reads schema {SCHEMA}")
        kinds = {"run_id": str, "version": str, "started": str, "part": int, "metadata": dict}
        for name, kind in kinds.items():
            if not isinstance(fields.get(name), kind):
                raise ValueError(f"{name} of the header is {fields.get(name)!r:.40}")
        return cls(**{name: fields[name] for name in kinds}, before=Accounts.from_json(fields.get("before")))


@dataclass(frozen=True)
class LedgerPart:
    """One part as it was read; `header` is None where not even that line is whole."""

    path: Path
    header: Header | None
    records: list[Record]
    kept_bytes: int
    dropped_bytes: int


def part_path(folder: Path, number: int) -> Path:
    """Where a part lies."""
    return folder / f"ledger-{number:05d}.jsonl"


def list_parts(folder: Path) -> list[Path]:
    """The parts of a folder in order; LedgerError where one is missing in between."""
    parts = sorted((path for path in folder.glob("ledger-*.jsonl") if _number(path) >= 0), key=_number)
    for before, after in itertools.pairwise(parts):
        if part_path(folder, _number(before) + 1) != after:
            raise LedgerError(
                f"The ledger in {folder} has a gap between {before.name} and {after.name}. Restore the parts."
            )
    return parts


def read_part(path: Path) -> LedgerPart:
    """Read a part up to its last whole line; LedgerError, with the line, where one cannot be read."""
    header: Header | None = None
    records: list[Record] = []
    number, kept = 0, 0
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no plain file")  # a pipe would be waited for without end
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if not line.endswith(b"\n") and len(line) <= MAX_LINE:
                    return LedgerPart(path, header, records, kept, len(line))  # torn: the writer died within it
                if len(line) > MAX_LINE:
                    raise ValueError(f"the line is longer than {MAX_LINE:,} bytes")
                if header is None:
                    header = Header.decode(line)
                else:
                    records.append(decode_record(decode_line(line)))
                kept += len(line)
    except OSError as error:
        raise LedgerError(
            f"{path} cannot be read: {error.strerror}. Give a run folder or a part of a ledger."
        ) from None
    except (ValueError, OverflowError) as error:
        reason = str(error) if not hasattr(error, "msg") else f"not JSON ({error})"
        raise LedgerError(f"{path}:{number}: {reason}. Give a ledger that floatline wrote.") from None
    return LedgerPart(path, header, records, kept, 0)


def add_up(part: LedgerPart, accounts: Accounts | None) -> Accounts:
    """The accounts after a part; LedgerError where a line is missing, in it or before it."""
    if part.header is None:
        raise LedgerError(f"{part.path} holds no whole header line. Delete it and create the ledger again.")
    if accounts is not None and accounts.as_json() != part.header.before.as_json():
        raise LedgerError(
            f"{part.path} begins after step {part.header.before.run.attempted:,}, but the part before it does not "
            f"add up to that. Lines are missing."
        )
    accounts = part.header.before if accounts is None else accounts
    for line, record in enumerate(part.records, start=2):
        if isinstance(record, Step) and record.attempt != accounts.run.attempted + 1:
            raise LedgerError(
                f"{part.path}:{line}: step {record.attempt:,} follows step {accounts.run.attempted:,}. "
                f"Lines are missing."
            )
        accounts.add(record)
    return accounts


class PartWriter:
    """Appends lines to the last part, and begins new parts.

    Lines wait in memory until `drain` has handed them to the operating system. A write that fails, even in mid-line,
    keeps exactly the bytes that are not out yet, and the next `drain` goes on from there.
    """

    def __init__(self, path: Path, *, part_bytes: int, keep_parts: int | None, fresh: bool) -> None:
        flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self.path = path
        self._file = os.open(path, flags | (os.O_CREAT | os.O_EXCL if fresh else 0), 0o644)
        self._size = os.fstat(self._file).st_size  # with what waits
        self._only_header = fresh
        self._part_bytes, self._keep_parts = part_bytes, keep_parts
        self._waiting: deque[bytearray | Path] = deque()  # a path: begin this part
        self._sync_error: OSError | None = None

    @property
    def part(self) -> int:
        """Number of the part that the next line goes to."""
        paths = [item for item in self._waiting if isinstance(item, Path)]
        return _number(paths[-1] if paths else self.path)

    @property
    def num_waiting_lines(self) -> int:
        """Lines that are not wholly handed to the operating system."""
        # A copy: the training thread asks too, while the writer adds.
        return sum(item.count(b"\n") for item in list(self._waiting) if not isinstance(item, Path))

    def has_room(self, line: bytes) -> bool:
        """Whether the line still belongs into this part."""
        return self._only_header or self._size + len(line) <= self._part_bytes

    def add(self, line: bytes) -> None:
        """Queue a line."""
        self._size += len(line)
        self._only_header = False
        if self._waiting and isinstance(self._waiting[-1], bytearray):
            self._waiting[-1] += line
        else:
            self._waiting.append(bytearray(line))

    def begin_part(self, header: bytes) -> None:
        """Queue the end of this part and the header of the next."""
        self._waiting.append(part_path(self.path.parent, self.part + 1))
        self._size = 0
        self.add(header)
        self._only_header = True

    def drain(self) -> None:
        """Hand everything that waits to the operating system; what fails stays and is tried again next time."""
        if self._sync_error is not None:
            raise self._sync_error
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, Path):
                self._open(item)
                continue
            del item[: os.write(self._file, item)]
            if not item:
                self._waiting.popleft()

    def sync(self) -> None:
        """Drain, and wait until the disk has it."""
        self.drain()
        try:
            os.fsync(self._file)
        except OSError as error:
            # The kernel may forget what it could not write, so a second fsync that succeeds proves nothing.
            self._sync_error = error
            raise

    def close(self) -> None:
        """Close the file; nothing more is written."""
        os.close(self._file)

    def _open(self, path: Path) -> None:
        """Begin a part, after the one before it is safely on the disk."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        file = os.open(path, flags, 0o644)
        try:
            os.fsync(self._file)
        except OSError as error:
            self._sync_error = error
            os.close(file)
            raise
        os.close(self._file)
        self._file, self.path = file, path
        self._waiting.popleft()
        sync_folder(path.parent)
        if self._keep_parts is None:
            return
        number = _number(path) - self._keep_parts
        while (old := part_path(path.parent, number)).exists():
            old.unlink()
            number -= 1


def check_sizes(part_bytes: int, keep_parts: int | None) -> None:
    """Raise LedgerError for parts too small to hold a header, or none kept."""
    if part_bytes < 4096:
        raise LedgerError(f"part_bytes is {part_bytes}. Give 4,096 or more.")
    if keep_parts is not None and keep_parts < 1:
        raise LedgerError(f"keep_parts is {keep_parts}. Give 1 or more, or None to keep all.")


def _number(path: Path) -> int:
    """The number in a part's name; -1 for another name."""
    digits = path.stem.removeprefix("ledger-")
    return int(digits) if digits.isascii() and digits.isdigit() else -1
