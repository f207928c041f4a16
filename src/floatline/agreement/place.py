"""Where two computations part: a layer, and the operation in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from floatline.agreement.reading import Reading


@dataclass(frozen=True)
class OpPlace:
    """One operation.

    Args:
        op: Its name, as "aten.mm".
        file: File of the user's code; '' where there is none.
        line: Line in it; 0 where there is none.
        phase: "forward" or "backward".
        seen: What was seen there.
        also: Lines that made what it reads, and that differ, too.
    """

    op: str
    file: str
    line: int
    phase: Literal["forward", "backward"]
    seen: str
    also: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """'model.py:12', for people."""
        return f"{Path(self.file).name}:{self.line}" if self.file else self.op


@dataclass(frozen=True)
class EntryPlace:
    """The smallest part of the computation that shows the difference on inputs that both sides share.

    Args:
        module: Its name; '' is the whole computation.
        kind: The class of the module; '' for a function.
        reading: What was measured there.
        op: The operation; None where none can be named.
        others: Other modules of the same level that show one, too.
    """

    module: str
    kind: str
    reading: Reading
    op: OpPlace | None = None
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = f"{self.module} ({self.kind})" if self.module else "its own operations"
        phase = "" if self.reading.phase == "forward" else ", backward"
        also = f", and {len(self.others)} more" if self.others else ""
        at = "" if self.op is None else f", {self.op.where}: {self.op.seen}"
        return f"{name}{also}{phase}{at}"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        op = self.op
        return {
            "module": self.module,
            "kind": self.kind,
            "phase": self.reading.phase,
            "op": None if op is None else op.op,
            "file": None if op is None else op.file,
            "line": None if op is None else op.line,
            "seen": None if op is None else op.seen,
            "made_at": [] if op is None else list(op.also),
            "others": list(self.others),
            "reading": self.reading.as_json(),
        }
