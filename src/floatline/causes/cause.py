"""Cause: one way 16-bit training fails, as data."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

Family = Literal["range", "rounding", "loop", "not-precision"]

FAMILIES: dict[Family, str] = {
    "range": "Range: a number does not fit the format",
    "rounding": "Rounding: a number fits, but not exactly",
    "loop": "Scaler, loop and dtype: the code around the model",
    "not-precision": "Not precision: FP32 fails too",
}


@dataclass(frozen=True)
class Cause:
    """One entry of the catalogue. Lint, diagnosis, guard, docs and `floatline explain` read it.

    Args:
        id: Stable name, such as 'eps-underflow'.
        title: One line for lists and findings.
        family: Which part of the catalogue it belongs to.
        mechanism: What happens to the numbers. Every number in it has a test.
        told_apart: How it is told from its neighbours, which are named by their ids.
        advice: What to do, as one sentence that names nothing which the reader does not have.
        remedies: Lines of code, each as 'code  # why', or sentences that end with a full stop.
        wrong_fix: What people try, and why it fails.
        messages: Regular expressions of error messages and log lines that only this cause gives.
            Empty for a cause that is silent or that shares its messages with others.
        reference: Public sources: 'owner/repository#number', 'arXiv:number' or an address.
    """

    id: str
    title: str
    family: Family
    mechanism: str
    told_apart: str
    advice: str
    remedies: tuple[str, ...]
    wrong_fix: str
    messages: tuple[str, ...]
    reference: str

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        return re.compile("|".join(f"(?:{m})" for m in self.messages), re.IGNORECASE) if self.messages else None

    def last_seen(self, text: str) -> int:
        """Where the last message of this cause ends in a text; -1 if the text holds none."""
        if self._pattern is None:
            return -1
        return max((match.end() for match in self._pattern.finditer(text)), default=-1)

    @property
    def links(self) -> dict[str, str]:
        """The address of each source that the reference names."""
        sources = re.findall(r"https://[^\s,]+|arXiv:[\d.]+\d|[\w.-]+/[\w.-]+#\d+", self.reference)
        return {source: _address(source) for source in sources}

    def as_json(self) -> dict[str, Any]:
        """All fields but the patterns, and the addresses."""
        fields = asdict(self)
        del fields["messages"]
        return {**fields, "remedies": list(self.remedies), "urls": list(self.links.values())}


def _address(source: str) -> str:
    if source.startswith("https://"):
        return source
    if source.startswith("arXiv:"):
        return f"https://arxiv.org/abs/{source.removeprefix('arXiv:')}"
    # GitHub sends /issues/N on to the pull request where N is one.
    repository, number = source.split("#")
    return f"https://github.com/{repository}/issues/{number}"
