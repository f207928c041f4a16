"""Numbers of a validation as texts: each is written here once, and every report shows the same characters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from floatline.base.texts import format_bytes
from floatline.report.document.document import Tone

if TYPE_CHECKING:
    from floatline.validation.result import PeakMemory, Speed, Validation
    from floatline.validation.verdict.comparison import Comparison
    from floatline.validation.verdict.terms import Terms

TONES: dict[str, Tone] = {
    "PASS": "good",
    "MARGINAL": "warn",
    "FAIL": "bad",
    "INCONCLUSIVE": "unsure",
    "REFUSED": "unsure",
}
UNKNOWN = "—"


def meaning_of(comparison: Comparison) -> str:
    """What the verdict claims, in one sentence."""
    terms, reference = comparison.terms, comparison.reference
    first, second = (terms.size(margin) for margin in terms.margins)
    words = {
        "PASS": f"No worse than {reference} by more than {first} on average: wrong in at most "
        f"{100 * terms.error(paired=comparison.paired):.3g} % of studies, for independent seeds of one kind, with "
        "noise up to exponential.",
        "MARGINAL": f"{_say_marginal(comparison)}: a person has to weigh it.",
        "FAIL": f"Worse than {reference} by {second} or more on average.",
        "INCONCLUSIVE": "Nothing is shown either way: this is not a pass.",
        "REFUSED": "The runs cannot answer the question: no verdict is given.",
    }
    if comparison.verdict == "FAIL" and comparison.interval is None:
        return f"Lost where {reference} was not."
    return words[comparison.verdict]


def _say_marginal(comparison: Comparison) -> str:
    first, second = comparison.terms.margins
    low, high = comparison.interval or (second, second)
    sizes = comparison.terms.size(first), comparison.terms.size(second)
    if high <= first:
        return f"Within {sizes[0]} on average, and held back by what the reason says"
    return (
        f"Worse by {sizes[0]} to {sizes[1]}" if low > first else f"Within {sizes[1]}, and not shown within {sizes[0]}"
    )


def sentence(text: str) -> str:
    """With a capital and a full stop; a first word with a digit in it, such as fp32, is a name and stays as it is."""
    if not text:
        return ""
    first = text.split(maxsplit=1)[0]
    head = text[0].upper() + text[1:] if first.strip(",.:;").isalpha() else text
    return head if head.endswith((".", "!", "?")) else f"{head}."


def show_value(value: float | None) -> str:
    """A metric's value."""
    return UNKNOWN if value is None else "NaN" if math.isnan(value) else f"{value:#.6g}".rstrip(".")


def show_excess(value: float | None, terms: Terms) -> str:
    """A difference; a candidate that diverged has none."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return terms.show(value) if math.isfinite(value) else "diverged"


def show_ends(low: float, high: float, terms: Terms) -> str:
    """An interval of differences."""
    return f"[{terms.show(low)}, {terms.show(high)}]"


def show_count(count: int | None) -> str:
    """A whole number."""
    return UNKNOWN if count is None else f"{count:,}"


def show_times(factor: float) -> str:
    """How many times: 1.82×."""
    return f"{factor:.2f}×"


def show_time(seconds: float) -> str:
    """The time of a step: 12.3 ms."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def show_change(ratio: float) -> str:
    """A ratio as a change: -38 %."""
    change = f"{100 * (ratio - 1):+.0f} %"
    return "0 %" if change in ("+0 %", "-0 %") else change


def show_share(share: float) -> str:
    """A share; one that is not zero never looks like it."""
    if share == 0:
        return "0 %"
    return f"{100 * share:.2g} %" if share >= 1e-4 else "< 0.01 %"


def speed_of(validation: Validation, arm: str) -> Speed | None:
    """The timing of a candidate."""
    return next((speed for speed in validation.speed if speed.arm == arm), None)


def memory_of(validation: Validation, arm: str) -> PeakMemory | None:
    """The memory of an arm."""
    return next((memory for memory in validation.memory if memory.arm == arm), None)


def speed_texts(speed: Speed) -> tuple[str, str]:
    """How many times as fast, and the rest of it."""
    timing = speed.timing
    ends = f"{show_times(1 / timing.high)} to {show_times(1 / timing.low)}"
    return show_times(timing.speedup), f"{timing.verdict}; {ends}, {timing.num_pairs:,} pairs of steps"


def is_emulated(validation: Validation) -> bool:
    """Whether its times are of 16 bits that a CPU computes in FP32, which say nothing about a GPU."""
    return any(memory.device == "cpu" for memory in validation.memory)


def memory_texts(ours: PeakMemory, theirs: PeakMemory) -> tuple[str, str]:
    """The change of the peak, and both peaks."""
    detail = f"{format_bytes(ours.peak)} against {format_bytes(theirs.peak)}, {ours.device}"
    return (show_change(ours.peak / theirs.peak) if theirs.peak else format_bytes(ours.peak)), detail
