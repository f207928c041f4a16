"""Trace: what every operation of one step did to the numbers. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floatline.probe.trace.operations import Op, Operand, Phase, Values
from floatline.probe.trace.trace_file import read_trace, write_trace

__all__ = ["Op", "Operand", "Phase", "Trace", "Values"]


@dataclass(slots=True)
class Trace:
    """The operations of one step, in their order.

    Args:
        ops: The operations.
        gradients: For each parameter with a gradient at the end of the last backward: that gradient
            (still scaled), against its twin.
        meta: What else is known: "twin_failures" and "failures" (operations whose twin could not be computed,
            or that could not be measured, with their count), "exception" (where one raised), and what
            the caller adds, such as "precision", "scale", "step".
    """

    ops: list[Op] = field(default_factory=list[Op])
    gradients: dict[str, Operand] = field(default_factory=dict[str, Operand])
    meta: dict[str, Any] = field(default_factory=dict[str, Any])

    def save(self, path: str | Path) -> None:
        """Write the trace as columns (`.npz`, no pickle)."""
        write_trace(Path(path), self.ops, self.gradients, self.meta)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace; raises `TraceError` where the file is none."""
        return cls(*read_trace(Path(path)))
