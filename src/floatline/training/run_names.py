"""Folder names for the runs of a target."""

from __future__ import annotations

import re
from pathlib import Path


def name_folder(target: str) -> str:
    """A folder name for a target: 'examples/small_gpt.py' is 'small_gpt', 'a.b:tiny' is 'b-tiny'."""
    place, _, function = target.rpartition(":")
    stem = Path(place or function).name
    stem = stem.removesuffix(".py") if stem.endswith(".py") else stem.rpartition(".")[2]
    parts = [stem] if not place or function == "build" else [stem, function]
    return re.sub(r"[^\w-]", "-", "-".join(parts))
