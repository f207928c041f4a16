"""A validation for the terminal: the verdict first, then what it rests on, in at most 20 lines."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from floatline.base.texts import printable
from floatline.report.diagnosis import styled_line
from floatline.report.validation.drawings import draw_line
from floatline.report.validation.texts import (
    meaning_of,
    memory_of,
    memory_texts,
    sentence,
    show_ends,
    show_excess,
    speed_of,
    speed_texts,
)

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.validation.result import Validation
    from floatline.validation.verdict.comparison import Comparison

_STYLES = {
    "PASS": "bold green",
    "MARGINAL": "bold yellow",
    "FAIL": "bold red",
    "INCONCLUSIVE": "bold magenta",
    "REFUSED": "bold magenta",
}
_WIDTH = 100
_TIED = "\u00a0"
_MOST_GATES, _MOST_OTHERS, _MOST_REASONS = 3, 3, 2


def print_validation(validation: Validation, console: Console, *, report: Path | None = None) -> None:
    """Print the verdict on the best candidate and where the report lies; colours only on a terminal.

    Args:
        validation: What was found out.
        console: Where to.
        report: The page that was written.
    """
    best = validation.best
    head = f"  {best.candidate} against {best.reference} on {best.terms.metric}"
    console.print(styled_line((best.verdict, _STYLES[best.verdict]), head), soft_wrap=True)
    _print(console, "because", sentence(best.reason))
    if best.verdict in ("PASS", "MARGINAL", "INCONCLUSIVE"):
        _print(console, "means", meaning_of(best))
    _print_interval(best, console)
    _print_costs(validation, best, console)
    for gate in best.failed_gates[:_MOST_GATES]:
        _print(console, "do", gate.advice)
    for flag in best.flags:
        _print(console, "note", sentence(flag))
    others = validation.comparisons[1:]
    for other in others[:_MOST_OTHERS]:
        label = "also" if other is others[0] else ""
        parts: tuple[str | tuple[str, str], ...] = (other.candidate, ": ", (other.verdict, _STYLES[other.verdict]))
        if other.interval is not None:
            parts = (*parts, f", {show_ends(*other.interval, other.terms)}")
        _print_line(console, label, styled_line(*parts))
    if len(others) > _MOST_OTHERS:
        _print(console, "", f"and {len(others) - _MOST_OTHERS} more")
    if report is not None:
        _print_line(console, "report", styled_line(str(report)))


def _print_interval(comparison: Comparison, console: Console) -> None:
    """The difference in numbers, and one line that draws it."""
    terms, interval = comparison.terms, comparison.interval
    if comparison.difference is None or interval is None:
        return
    kind = "paired seeds" if comparison.paired else "unpaired seeds"
    words = f"{show_excess(comparison.difference, terms)} {show_ends(*interval, terms)}"
    _print_line(console, "differs", styled_line(f"{words}; {len(comparison.seeds)} {kind}"))
    labels = (terms.size(terms.margins[0]), terms.size(terms.margins[1]))
    width = max(16, min(44, console.width - 44))
    drawn = draw_line(comparison.difference, *interval, margins=terms.margins, labels=labels, width=width)
    _print_line(console, "", styled_line(drawn))


def _print_costs(validation: Validation, comparison: Comparison, console: Console) -> None:
    speed = speed_of(validation, comparison.candidate)
    words = " as fast, ".join(speed_texts(speed)) if speed else "not measured"
    _print_line(console, "speed", styled_line(words))
    ours, theirs = (memory_of(validation, arm) for arm in (comparison.candidate, comparison.reference))
    words = ", ".join(memory_texts(ours, theirs)) if ours and theirs else "not measured"
    _print_line(console, "memory", styled_line(words))
    for reason in validation.reasons.get(comparison.candidate, ())[:_MOST_REASONS]:
        _print(console, "", sentence(reason), most=2)


def _print(console: Console, label: str, words: str, *, most: int = 2) -> None:
    """Sentences, broken between words: as many whole ones as fit, the first in any case. The page has the others."""
    width = max(min(console.width, _WIDTH) - 11, 20)
    wrapper = textwrap.TextWrapper(width, break_on_hyphens=False)
    # A number and its sign stand on one line: textwrap does not break at this blank.
    words = printable(words).replace(" %", f"{_TIED}%")
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", words)
    while len(sentences) > 1 and len(wrapper.wrap(" ".join(sentences))) > most:
        sentences.pop()
    for number, line in enumerate(wrapper.wrap(" ".join(sentences))):
        _print_line(console, "" if number else label, styled_line(line.replace(_TIED, " ")))


def _print_line(console: Console, label: str, text: Text) -> None:
    console.print(styled_line((f"  {label:<9}", "cyan")) + text, soft_wrap=True)
