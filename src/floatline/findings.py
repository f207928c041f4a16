"""Finding: where, what, seen how, what now; and GuardStop, which ends a run with one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from floatline.causes import Cause, find_cause
from floatline.errors import FloatlineError


@dataclass(frozen=True)
class RoundedAt:
    """The operation that rounded what another one fails of.

    Args:
        file: Source file.
        line: Line in that file, counted from 1.
        op: The operation, such as 'aten.sigmoid'.
    """

    file: str
    line: int
    op: str


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with its evidence and what to change.

    Args:
        cause: What it is: an entry of the catalogue.
        seen: The evidence: numbers, as they were measured.
        fix: What to change here: a sentence, or the code that stands there afterwards, of one line or of several.
        module: Qualified name of the module or parameter ('' is the root).
        file: Source file, where the place is a line of code.
        line: Line in that file, counted from 1.
        op: The operation, such as 'aten.mm'.
        patch: The fix as a unified diff, where it is a change of the user's source that was tried; '' where it is not.
        tried: What came of trying fixes in the user's source, as one sentence; '' where none was tried.
        origin: Where what fails here was rounded, if that is another line.
    """

    cause: Cause
    seen: str
    fix: str
    module: str = ""
    file: str = ""
    line: int = 0
    op: str = ""
    patch: str = ""
    tried: str = ""
    origin: RoundedAt | None = None

    @property
    def where(self) -> str:
        """The most exact place that is known."""
        if self.file:
            return f"{self.file}:{self.line}" if self.line else self.file
        return self.module or "the model"

    def as_json(self) -> dict[str, Any]:
        """The fields of the command-line contract."""
        return {
            "cause": self.cause.id,
            "module": self.module,
            "file": self.file,
            "line": self.line,
            "op": self.op,
            "seen": self.seen,
            "fix": self.fix,
            "patch": self.patch,
            "tried": self.tried,
            "remedies": list(self.cause.remedies),
            **({} if self.origin is None else {"origin": asdict(self.origin)}),
        }

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Finding:
        """What `as_json` gave, without what came of fixes."""
        origin = RoundedAt(**entry["origin"]) if "origin" in entry else None
        names = ("seen", "fix", "module", "file", "line", "op")
        return cls(find_cause(entry["cause"]), **{name: entry[name] for name in names}, origin=origin)

    def __str__(self) -> str:
        """Four lines for people, and more for code of several lines."""
        fix = self.fix.replace("\n", "\n        ")
        return (
            f"{self.where}: {self.cause.id}: {self.cause.title}\n"
            f"  seen: {self.seen}\n"
            f"  fix:  {fix}\n"
            f"  why:  floatline explain {self.cause.id}"
        )


class GuardStop(FloatlineError):  # noqa: N818 - it is an end, not an error of the caller
    """A run that the guard has ended: the ledger and the last good state are on the disk.

    Args:
        message: What happened, where, and what to do.
        finding: Cause, evidence and fix; None where the cause is not known.
    """

    def __init__(self, message: str, *, finding: Finding | None = None) -> None:
        super().__init__(message)
        self.finding = finding
