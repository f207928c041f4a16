"""CompiledReport: what a comparison of compiled code says, as it passes from one process to another. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CompiledReport:
    """What is told of compiled code.

    Args:
        fields: Plain data, for `--format json`.
        text: The same for people; the first line is the verdict.
        status: Exit code: 0 within rounding, 1 farther or wrong, 2 nothing can be said.
    """

    fields: Mapping[str, Any]
    text: str
    status: int

    @classmethod
    def of_problem(cls, problem: str, backend: str = "") -> CompiledReport:
        """Nothing can be said, for a reason."""
        names = ("verdict", "summary", "graphs", "outputs", "entry", "reproducer", "notes", "problem", "seconds")
        values: tuple[Any, ...] = ("no-verdict", problem, 0, [], None, None, [], problem, 0.0)
        return cls(
            {"backend": backend, **dict(zip(names, values, strict=True))}, f"compiled: not compared: {problem}", 2
        )

    def as_parts(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)
