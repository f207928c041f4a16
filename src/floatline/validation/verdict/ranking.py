"""Several candidates: which one to take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from floatline.validation.verdict.comparison import Comparison, Verdict

ORDER: tuple[Verdict, ...] = ("PASS", "MARGINAL", "INCONCLUSIVE", "REFUSED", "FAIL")


def rank(
    comparisons: Sequence[Comparison],
    *,
    time_ratios: Mapping[str, float] | None = None,
    memory_ratios: Mapping[str, float] | None = None,
) -> tuple[Comparison, ...]:
    """The candidates, the one to take first.

    By verdict; then a PASS that is not suspiciously better; then, where they are known, time and memory; then the
    upper end of the interval. Quality beyond PASS buys nothing, so that speed goes before it.

    Args:
        comparisons: One for each candidate.
        time_ratios: Seconds of the candidate over seconds of FP32, by its name.
        memory_ratios: Bytes likewise.
    """
    times, memories = time_ratios or {}, memory_ratios or {}

    def place(comparison: Comparison) -> tuple[int, bool, float, float, float]:
        return (
            ORDER.index(comparison.verdict),
            comparison.verdict == "PASS" and comparison.suspicious,
            times.get(comparison.candidate, math.inf),
            memories.get(comparison.candidate, math.inf),
            comparison.interval[1] if comparison.interval else math.inf,
        )

    return tuple(sorted(comparisons, key=place))


def describe_several(num_candidates: int, *, alpha: float = 0.05) -> str:
    """What several candidates do to the error; '' for one."""
    if num_candidates < 2:
        return ""
    most = min(1.0, num_candidates * alpha)
    return (
        f"{num_candidates} candidates were judged, each with its own {100 * alpha:.0f} % chance of a false PASS; "
        f"the chance that any is false is at most {100 * most:.0f} %"
    )
