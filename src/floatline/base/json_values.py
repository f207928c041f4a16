"""Numbers as strict JSON holds them, NaN and the infinities too: written in one way everywhere."""

from __future__ import annotations

import math
from typing import Any, cast

# JSON has no such numbers. As strings every parser reads them.
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_number(value: float) -> float | str:
    """A float as JSON can hold it.

    Numerics:
        Exact: finite values go through Python's shortest repr, -0.0 keeps its sign, NaN and the infinities become
        "NaN", "Infinity" and "-Infinity". Payload and sign of a NaN are not kept.
    """
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode_number(value: Any) -> float:
    """The float that `encode_number` was given; ValueError for anything that it never writes."""
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)


def plain_json(value: Any) -> Any:
    """Dicts, lists, tuples and numbers as strict JSON holds them, with every float as `encode_number` has it."""
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in cast("list[Any]", value)]
    return encode_number(float(value)) if isinstance(value, float) else value
