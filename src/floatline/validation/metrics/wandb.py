"""Weights & Biases' offline runs: history, summary and settings of a .wandb file, read without W&B."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from floatline.errors import ComparisonError
from floatline.validation.metrics.protobuf import as_bytes, as_float, as_signed, as_text, read_fields
from floatline.validation.metrics.recorded import STEP_NAMES, Recorded, as_number, as_step, parse_json

LARGEST_RECORD = 16 << 20
BLOCK = 32768  # LevelDB's log format: blocks of this size, records cut at their ends
FILE_HEAD = b":W&B"
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
# Fields of Record, HistoryRecord, HistoryItem (SummaryItem and ConfigItem share its first ones) and RunRecord.
RECORD_HISTORY, RECORD_SUMMARY, RECORD_CONFIG, RECORD_RUN = 2, 3, 5, 17
HISTORY_ITEM, HISTORY_STEP = 1, 2
UPDATE = 1
ITEM_KEY, ITEM_NESTED_KEY, ITEM_INTEGER, ITEM_NUMBER, ITEM_JSON = 1, 2, 5, 6, 16
RUN_CONFIG = 4


def read_wandb_file(path: Path) -> Recorded:
    """Everything that was logged, with its steps; a record that is cut off at the end is left out.

    Raises:
        ComparisonError: The file is not a W&B run, a checksum is wrong, or a record cannot be read.
    """
    recorded = Recorded(path, "W&B")
    with path.open("rb") as file:
        if file.read(7)[:4] != FILE_HEAD:
            raise ComparisonError(f"'{path}' is not a W&B run: it does not begin with ':W&B'. Name another file.")
        try:
            for record in _records(file, path):
                _take(recorded, record)
        except ComparisonError:
            raise  # a wrong checksum, which is a ValueError as well
        except (ValueError, struct.error) as error:
            raise ComparisonError(f"'{path}' holds a record that is not W&B's: {error}. Name another.") from None
    return recorded


def _records(file: BinaryIO, path: Path) -> Iterator[bytes]:
    parts: list[bytes] = []
    size = 0  # of the parts; adding them up each time would take ages for a million empty ones
    while True:
        place = file.tell()
        left = BLOCK - place % BLOCK
        if left < 7:
            file.seek(left, 1)
            continue
        head = file.read(7)
        if len(head) < 7:
            return
        checksum, length, kind = struct.unpack("<IHB", head)
        data = file.read(length)
        if len(data) < length:
            return
        if zlib.crc32(data, zlib.crc32(head[6:])) != checksum:
            raise ComparisonError(f"'{path}' is damaged at byte {place:,}: its checksum is wrong. Copy it again.")
        if kind in (FULL, FIRST):
            parts, size = [], 0
        size += length
        if size > LARGEST_RECORD:
            parts = []  # too large for numbers: forget it, and let the rest pass
            continue
        if data:
            parts.append(data)
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts, size = [], 0


def _take(recorded: Recorded, record: bytes) -> None:
    for number, _, value in read_fields(record):
        if number == RECORD_HISTORY:
            _take_history(recorded, as_bytes(value))
        elif number == RECORD_SUMMARY:
            for name, entry in _items(as_bytes(value), UPDATE):
                final = as_number(entry)
                if final is not None and not name.startswith("_"):
                    recorded.finals[name] = final
        elif number == RECORD_CONFIG:
            recorded.settings.update(_items(as_bytes(value), UPDATE))
        elif number == RECORD_RUN:
            for inner, _, config in read_fields(as_bytes(value)):
                if inner == RUN_CONFIG:
                    recorded.settings.update(_items(as_bytes(config), UPDATE))


def _take_history(recorded: Recorded, history: bytes) -> None:
    step, items = None, dict(_items(history, HISTORY_ITEM))
    for number, _, value in read_fields(history):
        if number == HISTORY_STEP:
            step = next((as_signed(num) for inner, _, num in read_fields(as_bytes(value)) if inner == 1), 0)
    if step is None:
        step = as_step(items.get("_step"))
    for name, entry in items.items():
        number = as_number(entry)
        if number is not None and name not in STEP_NAMES and not name.startswith("_"):
            recorded.add(name, step, number)


def _items(message: bytes, field: int) -> Iterator[tuple[str, Any]]:
    """Name and value of each item; a nested name is joined with dots, as W&B shows it."""
    for number, _, item in read_fields(message):
        if number != field:
            continue
        key, nested, entry = "", list[str](), None
        for inner, _, value in read_fields(as_bytes(item)):
            if inner == ITEM_KEY:
                key = as_text(value)
            elif inner == ITEM_NESTED_KEY:
                nested.append(as_text(value))
            elif inner == ITEM_INTEGER:
                raw = as_signed(value)
                entry = (raw >> 1) ^ -(raw & 1)  # sint64
            elif inner == ITEM_NUMBER:
                entry = as_float(value)
            elif inner == ITEM_JSON:
                entry = parse_json(as_text(value))
        yield ".".join(nested) or key, entry
