"""The wire format of protocol buffers: as much of it as reading a few numbers takes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def read_fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and raw value of each field of a message.

    Raises:
        ValueError: The bytes are no message.
    """
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, place = _varint(data, place)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, place = _varint(data, place)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if size > len(data) - place:
            raise ValueError("a field that is longer than its message")
        yield number, kind, data[place : place + size]
        place += size


def as_bytes(value: int | bytes) -> bytes:
    """A field of bytes; ValueError for a number."""
    if isinstance(value, int):
        raise ValueError("a number where bytes were expected")
    return value


def as_text(value: int | bytes) -> str:
    """A field of text."""
    return as_bytes(value).decode("utf-8", errors="replace")


def as_signed(value: int | bytes) -> int:
    """A whole number that may be below zero, as int32 and int64 are written."""
    if not isinstance(value, int):
        raise ValueError("bytes where a number was expected")
    return value - (1 << 64) if value >> 63 else value


def as_float(value: int | bytes) -> float:
    """A float of 4 bytes or a double of 8."""
    data = as_bytes(value)
    return struct.unpack("<f" if len(data) == 4 else "<d", data)[0]


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise ValueError("a number that is cut off")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
    raise ValueError("a number of more than 10 bytes")
