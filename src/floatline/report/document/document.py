"""Document: what a report says, once, as plain data; the page, the Markdown and the JSON are made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Tone = Literal["plain", "good", "warn", "bad", "unsure"]
"""What a row or a word is to a reader; a colour never stands alone, the word is beside it."""


@dataclass(frozen=True)
class Words:
    """One paragraph.

    Args:
        text: Plain text.
        kind: 'flag' must be seen, 'note' may be, 'missing' says what was not measured, 'hint' how the
            page is used on a screen.
    """

    text: str
    kind: Literal["plain", "flag", "note", "missing", "hint"] = "plain"


@dataclass(frozen=True)
class Table:
    """Rows of texts under a head.

    Args:
        caption: What the table is.
        head: Names of the columns.
        rows: One text for each column.
        named: Columns that hold a name a user wrote, or a number's key: set as code.
        numeric: Columns that are set to the right.
        tones: One for each row; empty: all plain.
        folded: Behind a click, since it is long and seldom read.
        cards: Too wide for a phone, where each row becomes a card.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    named: tuple[int, ...] = ()
    numeric: tuple[int, ...] = ()
    tones: tuple[Tone, ...] = ()
    folded: bool = False
    cards: bool = False


@dataclass(frozen=True)
class Drawing:
    """A picture.

    Args:
        svg: For the page; it escapes what it holds.
        summary: The same in words, with the numbers: for those who cannot see it.
        plain: The same in characters, for Markdown; '' where a table says it.
        legend: Names of its colours p0, p1, …
    """

    svg: str
    summary: str
    plain: str = ""
    legend: tuple[str, ...] = ()


@dataclass(frozen=True)
class Curves:
    """Curves that answer to a pointer; the page only.

    Args:
        data: Numbers and names for the page's script.
        summary: What they show, with the last numbers.
    """

    data: dict[str, Any]
    summary: str


@dataclass(frozen=True)
class Code:
    """Text to be read or copied as it stands; one with a language has a button for that."""

    text: str
    language: str = ""
    caption: str = ""


def seven_digits(value: float | None) -> float | None:
    """A number for the page's script: 7 significant digits; None where it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


Block = Words | Table | Drawing | Curves | Code


@dataclass(frozen=True)
class Part:
    """One heading and what follows it."""

    heading: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Chapter:
    """Everything about one candidate.

    Args:
        heading: Candidate and reference.
        verdict: Its verdict; '' for a chapter that has none.
        lead: One sentence, the reason.
        parts: In the order in which a reader asks.
        folded: Behind a click: not the candidate to take.
    """

    heading: str
    verdict: str
    lead: str
    parts: tuple[Part, ...]
    folded: bool = False


@dataclass(frozen=True)
class Tile:
    """One number that is read first."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Document:
    """The whole report.

    Args:
        title: What was compared with what.
        subtitle: On which target, by which metric.
        verdict: PASS, MARGINAL, FAIL, INCONCLUSIVE or REFUSED.
        meaning: What that word means here.
        reason: What decided it.
        todo: What to do now, a sentence each; commands between backticks.
        tiles: The numbers that are read first.
        flags: What qualifies the verdict.
        before: Parts before the chapters: the ranking.
        chapters: One for each candidate, the best first.
        after: Parts behind them: what was asked, plan, environment, how to do it again.
        footer: Who made it, how long it took.
    """

    title: str
    subtitle: str
    verdict: str
    meaning: str
    reason: str
    tiles: tuple[Tile, ...]
    flags: tuple[str, ...]
    before: tuple[Part, ...]
    chapters: tuple[Chapter, ...]
    after: tuple[Part, ...]
    footer: str
    todo: tuple[str, ...] = ()

    def parts(self) -> Iterator[Part]:
        """Every part, in the order of the page."""
        yield from self.before
        for chapter in self.chapters:
            yield from chapter.parts
        yield from self.after

    @property
    def contents(self) -> tuple[str, ...]:
        """The headings that a reader may look for, in the order of the page."""
        own = [chapter.heading for chapter in self.chapters]
        return (*(part.heading for part in self.before), *own, *(part.heading for part in self.after))
