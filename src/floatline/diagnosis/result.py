"""Diagnosis: what a target's training was found to suffer from, the primary cause first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from floatline.findings import Finding

if TYPE_CHECKING:  # torch is not needed to hold a result
    from floatline.diagnosis.detectors.loss_scale import ScaleVerdict
    from floatline.diagnosis.headroom.step_rows import Row
    from floatline.fixes import CodeFix

Verdict = Literal["precision", "not-precision", "healthy", "no-verdict"]


@dataclass(frozen=True)
class Diagnosis:
    """Findings about one target, ranked, and what was done to reach them.

    Args:
        target: As the user wrote it.
        precision: What it was run in, such as 'fp16-mixed'.
        findings: The primary cause first; none where nothing is wrong.
        seconds: How long it took.
        tried: What was tried by replay, one sentence each, with its numbers.
        notes: What is worth saying and is no fault, such as a few steps skipped while the scale settled.
        scale: What is to be said about the loss scale; None where that is nothing.
        chart: What each module wrote in the step that was looked into; empty where none was.
        unexplained: What went wrong without a finding; '' where nothing did.
        fails_in_fp32: Whether that goes wrong in FP32, too; None where nobody saw FP32 at that point.
        no_verdict: Why nothing can be said, such as an error before the first step; '' where something can.
        fixes: Changes of the source that were tried together and hold, in the order in which they are made.
        num_steps: Steps that were looked at, or as many as a script's failure takes to show; 0 where that is not
            known.
        fp32_losses: Of the same run in FP32; empty where none was made.
    """

    target: str
    precision: str
    findings: tuple[Finding, ...]
    seconds: float
    tried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    scale: ScaleVerdict | None = None
    chart: tuple[Row, ...] = ()
    unexplained: str = ""
    fails_in_fp32: bool | None = False
    no_verdict: str = ""
    fixes: tuple[CodeFix, ...] = ()
    num_steps: int = 0
    fp32_losses: tuple[float, ...] = ()

    @property
    def primary(self) -> Finding | None:
        """The finding whose removal makes the step healthy."""
        return self.findings[0] if self.findings else None

    @property
    def verdict(self) -> Verdict:
        """Whether 16 bits are to blame, by the family of the primary cause.

        A loop that misuses a scaler or autocast counts as precision: FP32 trains without them. Where something went
        wrong for an unknown cause, 16 bits are to blame if FP32 was seen to have none of it.
        """
        if self.primary is not None:
            return "not-precision" if self.primary.cause.family == "not-precision" else "precision"
        if self.no_verdict:
            return "no-verdict"
        if not self.unexplained:
            return "healthy"
        if self.fails_in_fp32 or self.precision == "fp32":
            return "not-precision"
        return "precision" if self.fails_in_fp32 is False else "no-verdict"

    @property
    def status(self) -> int:
        """The exit code of the command: 0 healthy, 1 where something is wrong, 2 where nothing can be said."""
        if self.verdict == "no-verdict":
            return 2
        return int(self.verdict != "healthy")

    def as_json(self) -> dict[str, Any]:
        """The fields of the command-line contract; "scale" and "unexplained" where there is something to say."""
        more: dict[str, Any] = {} if self.scale is None else {"scale": self.scale.as_json()}
        if self.unexplained:
            more["unexplained"] = self.unexplained
        if self.verdict == "no-verdict":
            more["no_verdict"] = self.no_verdict or self.unexplained
        return {
            "target": self.target,
            "precision": self.precision,
            "verdict": self.verdict,
            "findings": [finding.as_json() for finding in self.findings],
            "seconds": round(self.seconds, 3),
            **more,
        }

    def __str__(self) -> str:
        """The primary finding for people, or one line."""
        if self.primary is None:
            return f"{self.target} in {self.precision}: {self.no_verdict or self.unexplained or 'healthy'}"
        return f"{self.target} in {self.precision}: {self.verdict}\n{self.primary}"
