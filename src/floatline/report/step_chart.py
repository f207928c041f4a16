"""The floatline chart of a step: a row for each module, its exponents against the format's limits."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from floatline.diagnosis.headroom.step_rows import Row, Span, rows_that_matter
from floatline.report.chart import COLOURS, STYLES, draw_axis, draw_labels, marks_of, zone_of

if TYPE_CHECKING:
    from rich.text import Text

_TITLE = "The step in {format}: exponents of what each module wrote"
_LEGEND = "▀ forward  ▄ backward  █ both"
_CELLS = {(True, True): "█", (True, False): "▀", (False, True): "▄", (False, False): " "}
_PASSES = ("▀", "▄")
_ROOM = 0.075  # beyond the lines, as a share of what is between them: what is further out is drawn at the edge
_WORDS_FROM = 64  # columns of a terminal: below, a row beyond a limit gets a sign instead of words
_STYLE = (
    ".floatline-step{color:var(--floatline-ink,#1f2328)}"
    ".floatline-step text{fill:currentColor}.floatline-step path{stroke:currentColor}"
    f".floatline-step .beyond{{fill:{COLOURS['overflow']}}}.floatline-step .blamed{{font-weight:600}}"
    "@media (prefers-color-scheme:dark){.floatline-step{color:var(--floatline-ink,#e6edf3)}"
    ".floatline-step .beyond{fill:#ff7b72}}"
)


@dataclass(frozen=True)
class _Scale:
    """Exponents laid out over columns or pixels."""

    first: float
    last: float
    beyond: float  # an exponent that is seen to be above the ceiling
    width: float

    def at(self, exponent: float) -> float:
        """Where an exponent stands; beyond the ends, at the end."""
        share = (exponent - self.first) / (self.last - self.first)
        return min(max(share, 0.0), 1.0) * self.width


def draw_step(rows: Sequence[Row], *, width: int = 80) -> Text:
    """The picture for a terminal: at most 20 rows, those that matter; empty without any.

    Args:
        rows: From `chart_rows`, all of one format.
        width: Columns of the terminal.
    """
    from rich.text import Text

    shown = rows_that_matter(rows)
    if not shown:
        return Text()
    fmt = shown[0].format
    wordy = width >= _WORDS_FROM
    notes = [_note(row) if wordy else "!" * (not row.fits) for row in shown]
    names = _names(shown, max(width // 4, 8))
    indent = 2 + max(map(len, names)) + 1
    num_columns = max(width - indent - 1 - max(map(len, notes)), 8)
    scale = _scale(shown[0], num_columns)
    places = [(min(int(scale.at(exponent)), num_columns - 1), exponent, name) for exponent, name in marks_of(fmt)]

    text = Text(no_wrap=True)
    text.append(_TITLE.format(format=fmt.name)[:width], style="bold")
    text.append(f"\n{_LEGEND[:width]}\n", style="dim")
    for row, name, note in zip(shown, names, notes, strict=True):
        line = Text.assemble(("▶ " if row.blamed else "  ", "bold red"), (name.ljust(indent - 2), "bold" * row.blamed))
        _append_bars(line, row, scale, {column for column, _, _ in places})
        line.append(f" {note}", style="red")
        line.rstrip()
        text.append_text(line.append("\n"))
    text.append(" " * indent + draw_axis(places, num_columns))
    for line in draw_labels(places, num_columns).splitlines():
        text.append(f"\n{' ' * indent}{line}"[: width + 1])
    rest = _rest(rows, shown)
    if rest:
        text.append(f"\n  {rest}", style="dim")
    return text


def step_chart_svg(rows: Sequence[Row], *, width: int = 880) -> str:
    """The same picture as a standalone SVG element, light or dark as the page is; every text in it is escaped."""
    shown = rows_that_matter(rows)
    if not shown:
        return ""
    fmt = shown[0].format
    left, right, top, tall = 190, 245, 48, 18
    bottom = top + tall * len(shown)
    rest = _rest(rows, shown)
    scale = _scale(shown[0], width - left - right)
    title = html.escape(_TITLE.format(format=fmt.name))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 44 + 18 * bool(rest)}" role="img" '
        f'class="floatline-step" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{title}</title><style>{_STYLE}</style>",
        f'<text x="10" y="18" font-size="14" font-weight="600">{title}</text>',
        '<text x="10" y="36" opacity="0.7">upper bar forward, lower bar backward</text>',
    ]
    for i, row in enumerate(shown):
        y = top + tall * i
        name = ("▶ " if row.blamed else "") + _names([row], 26)[0]
        parts.append(
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end" class="{"blamed" if row.blamed else "module"}">'
            f"{html.escape(name)}<title>{html.escape(_name(row))}</title></text>"
        )
        parts += [
            f'<rect x="{left + start:.1f}" y="{y + 2 + 7 * lower}" width="{end - start:.1f}" height="6" '
            f'fill="{colour}"/>'
            for lower, span in enumerate((row.forward, row.backward))
            for start, end, colour in _pieces(span, row, scale)
        ]
        parts.append(f'<text x="{width - right + 8}" y="{y + 13}" class="beyond">{html.escape(_words(row))}</text>')
    for i, (exponent, name) in enumerate(marks_of(fmt)):
        x = left + scale.at(exponent)
        parts.append(f'<path d="M{x:.1f} {top - 4}V{bottom + 6}" stroke-dasharray="3 3" opacity="0.6"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 20 + 14 * (i % 2)}" text-anchor="middle">{name} 2^{exponent}</text>'
        )
    if rest:
        parts.append(f'<text x="10" y="{bottom + 54}" opacity="0.7">{rest}</text>')
    return "".join([*parts, "</svg>"])


def _scale(row: Row, width: float) -> _Scale:
    exponents = [exponent for exponent, _ in marks_of(row.format)]
    floor, ceiling = min(exponents), max(exponents)
    room = _ROOM * (ceiling - floor)
    return _Scale(floor - room, ceiling + room, ceiling + room / 2, width)


def _ends(span: Span | None, scale: _Scale) -> tuple[float, float] | None:
    """First and last exponent of what is drawn; beyond the limits, of what FP32 has there."""
    if span is None:
        return None
    top = max(span.largest, span.reach if span.state in ("overflows", "sinks") else 0.0)
    if not top:
        return None
    low = scale.first if span.state == "sinks" else math.log2(min(span.smallest, top))
    # However little it is beyond the ceiling, it is drawn beyond it.
    return low, max(math.log2(top), scale.beyond if span.state == "overflows" else low)


def _append_bars(text: Text, row: Row, scale: _Scale, lines: set[int]) -> None:
    """One character for each column; the lines stay on top, so that a bar is seen to cross them."""
    covered = [_columns(_ends(span, scale), scale) for span in (row.forward, row.backward)]
    step = (scale.last - scale.first) / scale.width
    for column in range(int(scale.width)):
        halves = (column in covered[0], column in covered[1])
        alone = any(len(bar) == 1 and column in bar for bar in covered)
        if column in lines and not alone:
            text.append("│", style="dim")
            continue
        middle = scale.first + (column + 0.5) * step
        text.append(_CELLS[halves], style=STYLES[zone_of(middle, row.format)])


def _columns(ends: tuple[float, float] | None, scale: _Scale) -> range:
    if ends is None:
        return range(0)
    first, last = (min(int(scale.at(exponent)), int(scale.width) - 1) for exponent in ends)
    return range(first, last + 1)


def _pieces(span: Span | None, row: Row, scale: _Scale) -> list[tuple[float, float, str]]:
    """A bar cut where the format's zones meet, each piece with its colour."""
    ends = _ends(span, scale)
    if ends is None:
        return []
    low, high = ends[0], max(ends[1], ends[0] + 0.3)  # a single value is still seen
    cuts = [low, *(float(exponent) for exponent, _ in marks_of(row.format) if low < exponent < high), high]
    pieces = [(scale.at(a), scale.at(b), COLOURS[zone_of((a + b) / 2, row.format)]) for a, b in pairwise(cuts)]
    return [piece for piece in pieces if piece[1] > piece[0]]


def _name(row: Row) -> str:
    return "".join(c if c.isprintable() else " " for c in row.module) or "(root)"


def _names(rows: Sequence[Row], longest: int) -> list[str]:
    """The names, cut at the front where they are long: their ends tell them apart."""
    names = [_name(row) for row in rows]
    return [name if len(name) <= longest else f"…{name[1 - longest :]}" for name in names]


def _note(row: Row) -> str:
    """What is wrong in which pass: '▀ overflow ▄ 98 % to 0'."""
    parts = zip(_PASSES, (row.forward, row.backward), strict=True)
    return " ".join(f"{sign} {_word(span)}" for sign, span in parts if span is not None and span.state != "fits")


def _words(row: Row) -> str:
    parts = zip(("forward", "backward"), (row.forward, row.backward), strict=True)
    return ", ".join(f"{name} {_word(span)}" for name, span in parts if span is not None and span.state != "fits")


def _word(span: Span) -> str:
    if span.state == "sinks":
        return f"{math.floor(span.lost * 100)} % to 0"
    return "overflow" if span.state == "overflows" else "inf/NaN"


def _rest(rows: Sequence[Row], shown: Sequence[Row]) -> str:
    kept = {row.module for row in shown}
    hidden = [row for row in rows if row.module not in kept]
    beyond = sum(not row.fits for row in hidden)
    if not hidden:
        return ""
    return f"… {len(hidden)} more within the limits" if not beyond else f"… {len(hidden)} more, {beyond} beyond a limit"
