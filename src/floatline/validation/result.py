"""Validation: everything that one `floatline validate` found out, as plain data for the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from floatline.base.plain_records import from_plain, to_plain
from floatline.validation.verdict.comparison import Comparison, Verdict
from floatline.validation.verdict.pairs import REFERENCE, ArmRun
from floatline.validation.verdict.timing import Timing


@dataclass(frozen=True)
class Speed:
    """How long one step takes, against FP32.

    Args:
        arm: The candidate.
        timing: Candidate over FP32, from interleaved steps.
        reference_seconds: Median seconds of an FP32 step.
        candidate_seconds: Median seconds of the candidate's step.
        first_seconds: Seconds of the candidate's first step, which is not among the timed ones.
    """

    arm: str
    timing: Timing
    reference_seconds: float
    candidate_seconds: float
    first_seconds: float | None = None


@dataclass(frozen=True)
class PeakMemory:
    """What one arm needed, from a process of its own.

    Args:
        arm: Whose.
        peak: Bytes at the highest point: of the process on a CPU, of the allocator on a GPU.
        parts: Bytes by part: 'weights', 'master', 'gradients', 'states', 'activations'; what was not measured is
            missing.
        device: Such as 'cpu' or 'cuda'.
    """

    arm: str
    peak: int
    parts: dict[str, int] = field(default_factory=dict[str, int])
    device: str = "cpu"


@dataclass(frozen=True)
class LayerNumbers:
    """One module of one recorded step of a candidate.

    Args:
        module: Qualified name; '' is what lies outside of every module.
        headroom: Bits between its largest number and the format's largest; below 0 it overflowed.
        lost: Share of its gradient elements that are 0 and not in FP32.
        cosine: Of its parameters' gradients with FP32's; None where it has no parameters.
        norm_ratio: Their norm over FP32's; None where it has no parameters.
    """

    module: str
    headroom: float | None
    lost: float
    cosine: float | None = None
    norm_ratio: float | None = None


@dataclass(frozen=True)
class Validation:
    """One study: a reference, one or several candidates, and everything that was measured.

    Args:
        target: As the user wrote it; for outside commands, the candidate's command.
        comparisons: One for each candidate, the best first.
        runs: Every arm run, in the order in which the seeds were planned.
        speed: One for each candidate that could be timed.
        memory: One for each arm that was measured, FP32 among them.
        layers: By candidate, the modules of one recorded step in order of execution.
        reasons: By candidate, why it is not faster, or not smaller, in sentences with numbers.
        plans: By arm, its plan as plain data.
        environment: Versions, hardware, commit; by name.
        reproduce: The command that does it again.
        seconds: How long all of it took.
        folder: Where the study lies.
    """

    target: str
    comparisons: tuple[Comparison, ...]
    runs: tuple[ArmRun, ...] = ()
    speed: tuple[Speed, ...] = ()
    memory: tuple[PeakMemory, ...] = ()
    layers: dict[str, tuple[LayerNumbers, ...]] = field(default_factory=dict[str, "tuple[LayerNumbers, ...]"])
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])
    plans: dict[str, dict[str, Any]] = field(default_factory=dict[str, "dict[str, Any]"])
    environment: dict[str, str] = field(default_factory=dict[str, str])
    reproduce: str = ""
    seconds: float = 0.0
    folder: str = ""

    @property
    def best(self) -> Comparison:
        """The candidate that is ranked first."""
        return self.comparisons[0]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the best candidate."""
        return self.best.verdict

    def as_json(self) -> dict[str, Any]:
        """Every field, fit for strict JSON."""
        return to_plain(self)

    @classmethod
    def from_json(cls, data: Any) -> Validation:
        """The validation that `as_json` wrote; ComparisonError for anything else."""
        return from_plain(cls, data)

    def contract(self, report: str) -> dict[str, Any]:
        """What `floatline validate --format json` prints: the best candidate's numbers, and all of them by name.

        Args:
            report: Where the report lies.
        """
        best = self.best
        speed = next((s for s in self.speed if s.arm == best.candidate), None)
        peaks = {memory.arm: memory.peak for memory in self.memory}
        ours, theirs = peaks.get(best.candidate), peaks.get(REFERENCE)
        ratio = ours / theirs if ours and theirs else None
        parts = {memory.arm: memory.parts for memory in self.memory}
        return {
            "verdict": best.verdict,
            "target": self.target,
            "candidate": best.candidate,
            "metric": best.terms.metric,
            "difference": to_plain(best.difference),
            "interval": to_plain(best.interval),
            "margin": best.terms.margins[0],
            "seeds": len(best.seeds),
            "speed": {} if speed is None else to_plain(speed.timing),
            "memory": {"peak": peaks, "parts": parts, "ratio": ratio} if peaks else {},
            "gates": to_plain(best.gates),
            "reason": best.reason,
            "flags": list(best.flags),
            "candidates": {c.candidate: c.verdict for c in self.comparisons},
            "report": report,
            "seconds": round(self.seconds, 3),
        }
