"""TOML to plain data, by the standard library where it can."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: It is not TOML.
    """
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    loads: Callable[[str], dict[str, Any]] = importlib.import_module(name).loads
    return loads(text)
