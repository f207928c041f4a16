"""The ranges of a step for a page: what each module wrote, forward and backward, against the format's limits."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from floatline.report.chart import draw_step, marks_of
from floatline.report.document.document import Drawing
from floatline.report.document.format_scale import TOP, FormatScale
from floatline.report.validation.drawings import frame

if TYPE_CHECKING:
    from floatline.diagnosis.headroom.step_rows import Row, Span

_ROW, _STRIP = 50, 20
_LONGEST = 22  # characters of a name that leave room for the words at the end of the line, on a phone too
_COLUMNS = 96  # of the same picture in characters


def draw_step_ranges(rows: Sequence[Row]) -> Drawing | None:
    """The rows that matter as a drawing whose places are in percent, so that it fits any width; None without any.

    Args:
        rows: From a diagnosis, all of one format.
    """
    from floatline.diagnosis.headroom.step_rows import rows_that_matter  # torch comes with it

    shown = rows_that_matter(rows)
    if not shown:
        return None
    scale = FormatScale([exponent for exponent, _ in marks_of(shown[0].format)])
    body = scale.head()
    for number, row in enumerate(shown):
        y = TOP + _ROW * number
        body += _labels(row, y + 14)
        body += scale.zones(y + 20, _STRIP)
        for place, span in ((y + 26, row.forward), (y + 34, row.backward)):
            body += _bar(span, place, scale)
    summary = f"The step in {shown[0].format.name}: {'; '.join(f'{_name(row)}: {_words(row)}' for row in shown)}."
    svg = frame(body, height=TOP + _ROW * len(shown), summary=summary)
    return Drawing(svg, summary, plain=draw_step(rows, width=_COLUMNS).plain)


def _labels(row: Row, y: float) -> list[str]:
    name = _name(row)
    short = name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
    tone, weight = "good" if row.fits else "bad", "word" if row.blamed else "name"
    return [
        f'<text class="{weight}" x="0" y="{y}">{"▶ " * row.blamed}{html.escape(short)}'
        f"<title>{html.escape(name)}</title></text>",
        f'<text class="word {tone}" x="100%" y="{y}" text-anchor="end">{html.escape(_few_words(row))}'
        f"<title>{html.escape(_words(row))}</title></text>",
    ]


def _bar(span: Span | None, y: float, scale: FormatScale) -> list[str]:
    """What one pass wrote; beyond the limits, what FP32 has there."""
    if span is None:
        return []
    lost = span.state in ("overflows", "sinks")
    top = max(span.largest, span.reach if lost else 0.0)
    if not top or not math.isfinite(top):
        return []
    low = scale.ends[0] if span.state == "sinks" else math.log2(min(span.smallest, top))
    high = scale.ends[1] if span.state == "overflows" else math.log2(top)
    tone = "good" if span.state == "fits" else "bad"
    left, right = scale.at(low), max(scale.at(high), scale.at(low) + 0.5)
    return [f'<line class="bar {tone}" x1="{left:.2f}%" x2="{right:.2f}%" y1="{y}" y2="{y}"/>']


def _name(row: Row) -> str:
    from floatline.base.texts import printable

    return printable(row.module) or "(root)"


def _words(row: Row) -> str:
    """What is wrong in which pass; that it fits, where nothing is."""
    return ", ".join(f"{name} {word}" for name, word in _troubles(row).items()) or "fits"


def _few_words(row: Row) -> str:
    """The same as a phone has room for beside the name."""
    found = list(_troubles(row).values())
    if len(found) < 2:
        return _words(row)
    return f"{found[0]} in both" if found[0] == found[1] else f"{found[0]}, then {found[1]}"


def _troubles(row: Row) -> dict[str, str]:
    """A word for each pass that does not fit."""
    words = {"overflows": "overflow", "sinks": "to zero"}
    passes = (("forward", row.forward), ("backward", row.backward))
    return {
        name: words.get(span.state, "inf/NaN") for name, span in passes if span is not None and span.state != "fits"
    }
