"""Frozen dataclasses as plain JSON data, and back with checks."""

from __future__ import annotations

import reprlib
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast

from floatline.base.json_values import encode_number
from floatline.errors import ComparisonError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dictionaries, lists and numbers that strict JSON can hold.

    Numerics:
        Exact: floats keep every bit. NaN and the infinities become "NaN", "Infinity" and "-Infinity".
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: to_plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in cast("list[Any]", value)]
    if isinstance(value, float):
        return encode_number(float(value))  # a NumPy float is a float, and JSON does not know it
    return value


def from_plain(kind: type[T], data: Any) -> T:
    """What `to_plain` was given.

    Args:
        kind: The dataclass to make.
        data: What was read from JSON.

    Raises:
        ComparisonError: A field is missing, unknown, or holds the wrong kind of value; the message names it.
    """
    from pydantic import ValidationError

    if not isinstance(data, dict):
        shown = reprlib.repr(data)
        raise ComparisonError(f"{kind.__name__} was read as {shown}. Give the JSON object that as_json wrote.")
    names = {entry.name for entry in fields(cast("Any", kind))}
    unknown = [name for name in cast("dict[Any, Any]", data) if name not in names]
    if unknown:
        shown = reprlib.repr(unknown[0])
        raise ComparisonError(
            f"{kind.__name__} has no field {shown}. Remove it, or read it with the version that wrote it."
        )
    try:
        return _reader(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, ComparisonError):
            raise own from None  # the dataclass's own check, which says what to do
        place = ".".join(str(part) for part in first["loc"])
        raise ComparisonError(
            f"{kind.__name__} field {place!r} is {reprlib.repr(first['input'])}: {first['msg']}. Write it with as_json."
        ) from None


@cache
def _reader(kind: type[Any]) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
