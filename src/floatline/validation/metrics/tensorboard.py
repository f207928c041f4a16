"""TensorBoard's event files: the scalars of a TFRecord file, read without TensorBoard."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from floatline.errors import ComparisonError
from floatline.validation.metrics.protobuf import as_bytes, as_float, as_signed, as_text, read_fields
from floatline.validation.metrics.recorded import Recorded

LARGEST_RECORD = 1 << 20  # a scalar needs a hundred bytes; larger ones are graphs, images and sounds
# Fields of Event, Summary, Summary.Value and TensorProto.
EVENT_STEP, EVENT_SUMMARY = 2, 5
SUMMARY_VALUE = 1
VALUE_TAG, VALUE_SIMPLE, VALUE_TENSOR = 1, 2, 8
TENSOR_DTYPE, TENSOR_SHAPE, TENSOR_CONTENT, TENSOR_FLOAT, TENSOR_DOUBLE = 1, 2, 4, 5, 6
FORMATS = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}  # by DataType: float, double, int32, int64


def read_event_file(path: Path) -> Recorded:
    """Every scalar of an event file, with its step; a record that is cut off at the end is left out.

    Numerics:
        `add_scalar` writes float32: the value read is that float32, exactly.

    Raises:
        ComparisonError: A checksum is wrong, or a record is no event.
    """
    recorded = Recorded(path, "TensorBoard")
    for place, data, checksum in _records(path):
        try:
            found = list(_scalars(data))
        except (ValueError, struct.error) as error:
            raise ComparisonError(f"'{path}' is not an event file at byte {place:,}: {error}. Name another.") from None
        # In Python a checksum costs more than all else: it is worth it only where a value is taken.
        if found and _masked_crc(data) != checksum:
            raise ComparisonError(f"'{path}' is damaged at byte {place:,}: its checksum is wrong. Copy it again.")
        for tag, step, value in found:
            recorded.add(tag, step, value)
    return recorded


def _records(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Place, bytes and checksum of each record that may hold scalars."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while True:
            place = file.tell()
            head = file.read(12)
            if len(head) < 12:
                return
            length, checksum = struct.unpack("<QI", head)
            if _masked_crc(head[:8]) != checksum:
                raise ComparisonError(f"'{path}' is not an event file, or is damaged, at byte {place:,}. Name another.")
            if length > size - place:
                return
            if length > LARGEST_RECORD:
                file.seek(length + 4, 1)
                continue
            data, foot = file.read(length), file.read(4)
            if len(foot) < 4:
                return
            yield place, data, struct.unpack("<I", foot)[0]


def _scalars(event: bytes) -> Iterator[tuple[str, int, float]]:
    step, summaries = 0, list[bytes]()
    for number, _, value in read_fields(event):
        if number == EVENT_STEP:
            step = as_signed(value)
        elif number == EVENT_SUMMARY:
            summaries.append(as_bytes(value))
    for summary in summaries:
        for number, _, value in read_fields(summary):
            if number != SUMMARY_VALUE:
                continue
            tag, scalar = _value(as_bytes(value))
            if scalar is not None:
                yield tag, step, scalar


def _value(data: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, _, value in read_fields(data):
        if number == VALUE_TAG:
            tag = as_text(value)
        elif number == VALUE_SIMPLE:
            scalar = as_float(value)
        elif number == VALUE_TENSOR:
            scalar = _tensor(as_bytes(value))
    return tag, scalar


def _tensor(data: bytes) -> float | None:
    """The number of a tensor without dimensions; None for any other tensor."""
    dtype, content, listed = 0, b"", list[float]()
    for number, _, value in read_fields(data):
        if number == TENSOR_DTYPE:
            dtype = as_signed(value)
        elif number == TENSOR_SHAPE and value:
            return None
        elif number == TENSOR_CONTENT:
            content = as_bytes(value)
        elif number in (TENSOR_FLOAT, TENSOR_DOUBLE):
            raw = as_bytes(value)  # packed or alone, the bytes are the same
            letter = "f" if number == TENSOR_FLOAT else "d"
            listed += struct.unpack(f"<{len(raw) // struct.calcsize(letter)}{letter}", raw)
    if dtype not in FORMATS:
        return None
    if content:
        return float(struct.unpack(FORMATS[dtype], content)[0])
    return float(listed[0]) if listed else None


@cache
def _table() -> list[int]:
    rows: list[int] = []
    for byte in range(256):
        row = byte
        for _ in range(8):
            row = (row >> 1) ^ (0x82F63B78 if row & 1 else 0)
        rows.append(row)
    return rows


def _masked_crc(data: bytes) -> int:
    """CRC-32C, turned by 15 bits and moved by a constant, as TFRecord has it."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
