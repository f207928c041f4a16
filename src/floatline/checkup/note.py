"""Note: advice that is no finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Note:
    """One thing to know.

    Args:
        topic: What it is about.
        text: One or two sentences.
    """

    topic: Literal["setup", "precision", "memory", "speed"]
    text: str
