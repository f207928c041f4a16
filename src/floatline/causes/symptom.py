"""Symptom: a message that several causes share."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """A message that does not decide its cause.

    Args:
        title: What the message says, in one line.
        patterns: Regular expressions, any of which finds it.
        causes: The ids that fit, in the order worth checking.
        check: What to look at to decide between them.
    """

    title: str
    patterns: tuple[str, ...]
    causes: tuple[str, ...]
    check: str

    def is_in(self, text: str) -> bool:
        """Whether the text shows this symptom."""
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in self.patterns)
