"""Whether a candidate that is as good as FP32 is worth it: as much faster and smaller as was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from floatline.errors import ComparisonError
from floatline.validation.verdict.comparison import Comparison
from floatline.validation.verdict.timing import Timing


@dataclass(frozen=True)
class Wanted:
    """What a candidate must save.

    Args:
        faster: How many times as fast a step must be, such as 1.1; None asks for nothing.
        smaller: The share of FP32's peak memory that it may need, such as 0.9; None asks for nothing.

    Raises:
        ComparisonError: A number that nothing can be measured against.
    """

    faster: float | None = None
    smaller: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("faster", self.faster), ("smaller", self.smaller)):
            if value is not None and not 0 < value < 1000:
                raise ComparisonError(f"--{name} {value:g} is no ratio. Use such as --faster 1.1 --smaller 0.9.")

    def weigh(self, comparison: Comparison, times: Mapping[str, Timing], memory: Mapping[str, float]) -> Comparison:
        """The comparison, MARGINAL instead of PASS where it saves less than was asked for, or nobody measured.

        Args:
            comparison: Of one candidate.
            times: Timings by candidate; the slow end of the interval counts.
            memory: Its peak over FP32's, by candidate.
        """
        short = [text for text in (self._slow(times.get(comparison.candidate)),) if text]
        short += [text for text in (self._large(memory.get(comparison.candidate)),) if text]
        comparison = replace(comparison, notes=(*comparison.notes, *self._asked()))
        if comparison.verdict != "PASS" or not short:
            return comparison
        return replace(comparison, verdict="MARGINAL", reason=f"{comparison.reason}, but {' and '.join(short)}")

    @property
    def words(self) -> list[str]:
        """The options of `floatline validate` that ask for it."""
        faster = [] if self.faster is None else ["--faster", f"{self.faster:g}"]
        return [*faster, *([] if self.smaller is None else ["--smaller", f"{self.smaller:g}"])]

    def _asked(self) -> list[str]:
        """What a PASS had to save, for the report."""
        faster = [] if self.faster is None else [f"at least {self.faster:g}× as fast"]
        asked = [*faster, *([] if self.smaller is None else [f"at most {self.smaller:g} of FP32's peak memory"])]
        return [f"asked of a PASS: {' and '.join(asked)}"] if asked else []

    def _slow(self, timing: Timing | None) -> str:
        if self.faster is None or (timing is not None and 1 / timing.high >= self.faster):
            return ""
        if timing is None:
            return "its speed was not measured"
        return f"it is shown to be {1 / timing.high:.2f}× as fast, and {self.faster:g}× was asked for"

    def _large(self, ratio: float | None) -> str:
        if self.smaller is None or (ratio is not None and ratio <= self.smaller):
            return ""
        if ratio is None:
            return "its memory was not measured"
        return f"it needs {ratio:.2f} of FP32's memory, and {self.smaller:g} was asked for"
