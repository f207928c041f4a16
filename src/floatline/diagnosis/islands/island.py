"""Island: the modules or lines that a search found, what speaks for each, and how far it got. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from floatline.diagnosis.islands.errors import ReplayOutcome
from floatline.plans import KeptModule
from floatline.precision.islands import Line


@dataclass(frozen=True)
class Member:
    """One module of an island.

    Args:
        module: Its name.
        seen: What the trace shows of it, with numbers; '' where it shows nothing.
        without: What is wrong with the step when only this one is left out; '' where that was not tried.
    """

    module: str
    seen: str
    without: str

    @property
    def reason(self) -> str:
        """One sentence for a plan."""
        return "; ".join(text for text in (self.seen, f"without it {self.without}" if self.without else "") if text)


@dataclass(frozen=True)
class LineAlternative:
    """Lines of code that suffice in FP32.

    Args:
        lines: File and line of each.
        num_operations: 16-bit operations that they run in the forward pass, in all modules that use the code.
        of_island: The same of the modules that would be kept otherwise; 0 where there are none.
    """

    lines: tuple[Line, ...]
    num_operations: int
    of_island: int

    def __str__(self) -> str:
        """'model.py:31 in FP32, 12 operations a step (the modules: 5)'."""
        places = ", ".join(f"{Path(file).name}:{line}" for file, line in self.lines)
        against = f" (the modules: {self.of_island})" if self.of_island else ""
        count = f", {self.num_operations} operations a step{against}" if self.num_operations else ""
        return f"{places} in FP32{count}"


@dataclass(frozen=True)
class Island:
    """What a search found.

    Args:
        members: The modules to keep in FP32, in the model's order; none where none helps or none is needed.
        lines: Lines of code that do the same; None where none were found.
        reason: Why there are no modules; '' where there are.
        needed: Whether the steps fail as they are.
        complete: Whether the search came to its end. If not, the set passes but may not be the smallest.
        before: The first failing step as it was; None where all pass.
        after: The same step with the island; None where there is none.
        update_error: Of the optimizer's update against FP32's, the largest of the steps; None where it was not made.
        num_tried: Different sets of modules that were tried.
        num_replays: Replays that this search made; those of an earlier one that was killed are not in it.
        seconds: How long it took.
        notes: What else is to be said.
        tf32: Whether the steps pass with the modules' products in TF32, too; only a GPU can tell.
        ends: What the steps end in and are judged by, in words.
    """

    members: tuple[Member, ...]
    lines: LineAlternative | None
    reason: str
    needed: bool
    complete: bool
    before: ReplayOutcome | None
    after: ReplayOutcome | None
    update_error: float | None
    num_tried: int
    num_replays: int
    seconds: float
    notes: tuple[str, ...] = ()
    tf32: bool = False
    ends: str = "the gradient"

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the members."""
        return tuple(member.module for member in self.members)

    @property
    def kept(self) -> tuple[KeptModule, ...]:
        """The members for `Plan.fp32_modules`, with their reasons."""
        return tuple(KeptModule(pattern=_escape(m.module), reason=m.reason) for m in self.members)

    def as_json(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "modules": [{"module": m.module, "seen": m.seen, "without": m.without} for m in self.members],
            "lines": [] if self.lines is None else [{"file": f, "line": n} for f, n in self.lines.lines],
            "reason": self.reason,
            "needed": self.needed,
            "complete": self.complete,
            "before": None if self.before is None else asdict(self.before),
            "after": None if self.after is None else asdict(self.after),
            "update_error": self.update_error,
            "tried": self.num_tried,
            "replays": self.num_replays,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "tf32": self.tf32,
            "ends": self.ends,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Island:
        """What `as_json` was called on; how many operations lines have is not in it."""
        lines = tuple((entry["file"], entry["line"]) for entry in fields["lines"])
        before, after = (None if row is None else ReplayOutcome(**row) for row in (fields["before"], fields["after"]))
        plain = ("reason", "needed", "complete", "update_error", "seconds", "tf32", "ends")
        return cls(
            members=tuple(Member(**entry) for entry in fields["modules"]),
            lines=LineAlternative(lines, 0, 0) if lines else None,
            num_tried=fields["tried"],
            num_replays=fields["replays"],
            notes=tuple(fields["notes"]),
            before=before,
            after=after,
            **{name: fields[name] for name in plain},
        )

    def __str__(self) -> str:
        """A few lines for people."""
        effort = f"{self.num_tried} sets tried, {self.num_replays} replays, {self.seconds:.1f} s"
        if not self.members:
            head = [f"no module to keep in FP32: {self.reason}"]
        else:
            head = [
                f"{member.module} in FP32: {member.reason or 'the step fails without it'}" for member in self.members
            ]
        if self.after is not None:
            head.append(f"with it {self.ends} is {100 * self.after.error:.2g} % off FP32")
        if self.tf32:
            head.append("TF32 does for its products")
        if self.lines is not None:
            head.append(f"or {self.lines}")
        end = [] if self.complete else ["the budget was used up: a smaller set may do"]
        return "\n".join([*head, *end, *self.notes, effort])


def _escape(name: str) -> str:
    """A module's name as a pattern that matches it alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
