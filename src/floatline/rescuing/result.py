"""Rescue: what a rescue found out, stage by stage, as plain data; the outcome is derived."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from floatline.base.texts import on_one_line
from floatline.diagnosis.result import Diagnosis
from floatline.plans import Plan

if TYPE_CHECKING:  # torch is not needed to hold a result
    from floatline.diagnosis.islands.island import Island
    from floatline.fixes import CodeFix
    from floatline.validation.result import Validation

RescueOutcome = Literal["healthy", "rescued", "not-verified", "code-change", "not-precision", "unsolved"]


@dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        name: Such as 'diagnose'.
        seconds: How long it took.
        text: What came out, in one sentence.
    """

    name: str
    seconds: float
    text: str


@dataclass(frozen=True)
class Tried:
    """One plan that was tried in a short run.

    Args:
        does: What it changes.
        why: What speaks for it.
        shortfall: What it lacks against FP32; '' where it trains as FP32 does.
        seconds: How long the run took.
    """

    does: str
    why: str
    shortfall: str
    seconds: float


@dataclass(frozen=True)
class Rescue:
    """What a rescue found out.

    Args:
        target: As the user wrote it.
        diagnosis: What is wrong, with the change of the code that was tried.
        steps: Steps of every short run.
        plan: The plan that trains as FP32 does; None where none is needed, or none was found.
        does: What the plan changes, in a few words.
        island: The FP32 island that was searched; None where none was.
        tried: Plans in the order in which they were tried.
        validation: The plan against FP32 over several seeds; None where there is no plan.
        margin: How near to FP32 it had to come, for people; '' where there is no validation.
        proved: Whether the validation is the full one.
        stages: What was done, in order.
        notes: What else is to be said.
        complete: Whether all plans were tried that could be, up to the one that was taken.
        code: SHA-256 of each file of the target when the rescue began, by its path from the root.
        by_patch: Whether what was verified is the change of the code, and not a plan.
        is_script: Whether the target is a command that runs a script.
        curves: Losses of short runs, by name: 'FP32', 'as it is', 'rescued'.
    """

    target: str
    diagnosis: Diagnosis
    steps: int
    plan: Plan | None = None
    does: str = ""
    island: Island | None = None
    tried: tuple[Tried, ...] = ()
    validation: Validation | None = None
    margin: str = ""
    proved: bool = False
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = True
    code: dict[str, str] = field(default_factory=dict[str, str])
    by_patch: bool = False
    is_script: bool = False
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict[str, "tuple[float, ...]"])

    @property
    def outcome(self) -> RescueOutcome:
        """What it came to."""
        if self.diagnosis.verdict == "healthy":
            return "healthy"
        if self.diagnosis.verdict == "not-precision" and not self.by_patch:
            return "not-precision"
        if self.plan is not None or self.by_patch:
            passed = self.validation is not None and self.validation.verdict == "PASS"
            return "rescued" if passed else "not-verified"
        return "code-change" if self.complete and self.diagnosis.primary is not None else "unsolved"

    @property
    def solved(self) -> bool:
        """Whether nothing is left to do but to train."""
        return self.outcome in ("healthy", "rescued")

    @property
    def fixes(self) -> tuple[CodeFix, ...]:
        """Changes of the code that were tried together, without the plan, and hold."""
        return self.diagnosis.fixes

    @property
    def patch(self) -> str:
        """These changes as one diff; '' where there are none."""
        primary = self.diagnosis.primary
        return "" if primary is None else primary.patch

    @property
    def where(self) -> str:
        """The place of the primary cause, without folders; '' where there is none."""
        primary = self.diagnosis.primary
        if primary is None:
            return ""
        return f"{Path(primary.file).name}:{primary.line}" if primary.file and primary.line else primary.where

    @property
    def words(self) -> str:
        """The outcome in one or two sentences."""
        if self.outcome in ("rescued", "not-verified"):
            return self._say_way()
        primary = self.diagnosis.primary
        if primary is None and self.diagnosis.unexplained:
            return f"Not solved: {self.diagnosis.unexplained}."
        if primary is None:
            return "Training is healthy as it is: no plan is needed."
        if self.outcome == "not-precision":
            return (
                f"This is not precision, so no plan can fix it: {primary.cause.id} at {self.where}. "
                f"Do this: {on_one_line(primary.fix)}"
            )
        if self.outcome == "unsolved":
            tried = f"none of the {len(self.tried)} plans that were tried fixes it. Give more time with --budget."
            return f"Not solved yet: {primary.cause.id} at {self.where}; {tried}"
        change = "fix.patch has it" if self.fixes else f"do this: {on_one_line(primary.fix).rstrip('.')}"
        return f"No plan fixes {primary.cause.id} at {self.where}; the code must change: {change}."

    def _say_way(self) -> str:
        """What makes it train as FP32 does, and how far that was verified."""
        if self.validation is None:
            return f"With {self.does} it trains as FP32 does for {self.steps} steps. That is not verified."
        seeds = len(self.validation.best.seeds)
        kind = "full" if self.proved else "short"
        form = f"the {kind} validation ({seeds} seeds, margin {self.margin})"
        said = "trains as FP32 does"
        if not self.solved:
            said = f"keeps up with FP32 for {self.steps} steps, but is not verified"
        # A closed gate asks for more of something: the full form, with its narrower margins, does not open it.
        more = "" if self.proved or self.validation.verdict == "REFUSED" else ". --prove runs the full one"
        return f"With {self.does} it {said}: {form} says {self.validation.verdict}{more}."

    def as_json(self) -> dict[str, Any]:
        """What `--format json` prints; docs/rescue.md describes each field."""
        return {
            "target": self.target,
            "outcome": self.outcome,
            "words": self.words,
            "diagnosis": self.diagnosis.as_json(),
            "plan": None if self.plan is None else self.plan.model_dump(mode="json"),
            "does": self.does,
            "island": None if self.island is None else self.island.as_json(),
            "tried": [vars(tried) for tried in self.tried],
            "fixes": [{"file": fix.name, "line": fix.line, "says": fix.says, "safe": fix.safe} for fix in self.fixes],
            "verdict": None if self.validation is None else self.validation.verdict,
            "margin": self.margin,
            "proved": self.proved,
            "seeds": 0 if self.validation is None else len(self.validation.best.seeds),
            "stages": [vars(stage) for stage in self.stages],
            "notes": list(self.notes),
            "by_patch": self.by_patch,
            "seconds": round(sum(stage.seconds for stage in self.stages), 3),
        }

    def in_full(self) -> dict[str, Any]:
        """The same for rescue.json, with what `floatline approve` reads: the whole validation, and the code of then."""
        names = [] if self.validation is None else [comparison.candidate for comparison in self.validation.comparisons]
        return {
            **self.as_json(),
            "asked": {"code": dict.fromkeys(names, self.code)},
            "validation": None if self.validation is None else self.validation.as_json(),
        }
