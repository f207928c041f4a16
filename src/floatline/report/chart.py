"""The floatline charts: exponents of a tensor, and of each module of a step, against a format's limits."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from floatline.base.texts import percent, printable
from floatline.formats import Format, find_format

if TYPE_CHECKING:
    from rich.text import Text

    from floatline.diagnosis.headroom.step_rows import Row, Span
    from floatline.numerics.ranges import Ranges


Zone = Literal["zero", "subnormal", "normal", "overflow"]
STYLES: dict[Zone, str] = {"zero": "red", "subnormal": "yellow", "normal": "green", "overflow": "red"}
COLOURS: dict[Zone, str] = {"zero": "#c0392b", "subnormal": "#d29b00", "normal": "#2e8b57", "overflow": "#c0392b"}
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_HEIGHT = 6  # rows of bars in the terminal


@dataclass(frozen=True)
class Column:
    """One bar: the values with first <= floor(log2 |x|) <= last."""

    first: int
    last: int
    share: float
    zone: Zone


@dataclass(frozen=True)
class Chart:
    """What is drawn. `print` draws it plainly, rich in colour, `svg()` for a page."""

    title: str
    format: Format
    columns: tuple[Column, ...]
    shares: Mapping[Zone, float]  # of all finite non-zero values, exactly as counted

    @property
    def summary(self) -> str:
        """The four shares in words."""
        words: dict[Zone, str] = {
            "zero": "become zero",
            "subnormal": "subnormal",
            "normal": "fit",
            "overflow": "overflow",
        }
        return ", ".join(f"{_percent(self.shares[zone])} {words[zone]}" for zone in words)

    @property
    def marks(self) -> tuple[tuple[int, str], ...]:
        """The three lines: exponent at which each stands, and its name."""
        return marks_of(self.format)

    def __str__(self) -> str:
        """Plain text for a terminal without colours, a log or a test."""
        return self._text().plain

    def __rich__(self) -> Text:
        """Coloured text for rich."""
        return self._text()

    def _text(self) -> Text:
        from rich.text import Text

        text = Text()
        text.append(f"{self.title}\n", style="bold")
        text.append(f"{self.summary}\n")
        tallest = max((column.share for column in self.columns), default=0.0) or 1.0
        for row in reversed(range(_HEIGHT)):
            for column in self.columns:
                text.append(_cell(column.share / tallest, row), style=STYLES[column.zone])
            text.append("\n")
        places = [(sum(c.last < exponent for c in self.columns), exponent, name) for exponent, name in self.marks]
        text.append(f"{draw_axis(places, len(self.columns))}\n{draw_labels(places, len(self.columns))}")
        return text

    def svg(self, *, width: int = 720, height: int = 240) -> str:
        """The same picture as a standalone SVG element; every text in it is escaped."""
        left, right, top, bottom = 10, 10, 46, 34
        step = (width - left - right) / max(len(self.columns), 1)
        tall = height - top - bottom
        tallest = max((column.share for column in self.columns), default=0.0) or 1.0
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="12">',
            f"<title>{html.escape(self.title)}: {html.escape(self.summary)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text x="{left}" y="18" font-size="14" font-weight="600">{html.escape(self.title)}</text>',
            f'<text x="{left}" y="36" fill="#555555">{html.escape(self.summary)}</text>',
        ]
        for i, column in enumerate(self.columns):
            if column.share:
                bar = max(tall * column.share / tallest, 1.0)
                exponents = f"2^{column.first}"
                if column.last > column.first:
                    exponents += f" to 2^{column.last}"
                parts.append(
                    f'<rect x="{left + i * step:.1f}" y="{top + tall - bar:.1f}" width="{max(step - 1, 0.5):.1f}" '
                    f'height="{bar:.1f}" fill="{COLOURS[column.zone]}"><title>{exponents}: '
                    f"{html.escape(_percent(column.share))}</title></rect>"
                )
        floor = top + tall
        parts.append(f'<path d="M{left} {floor}H{width - right}" stroke="#333333"/>')
        for exponent, name in self.marks:
            x = left + step * sum(column.last < exponent for column in self.columns)
            anchor = "end" if x > width - 120 else "start"
            label = f"{name} 2^{exponent}"
            parts.append(f'<path d="M{x:.1f} {top}V{floor + 6}" stroke="#333333" stroke-dasharray="3 3"/>')
            parts.append(f'<text x="{x:.1f}" y="{floor + 20}" text-anchor="{anchor}">{html.escape(label)}</text>')
        return "".join([*parts, "</svg>"])


def draw_ranges(ranges: Ranges, to: Format | str, *, title: str = "", width: int = 76) -> Chart:
    """Lay measured exponents out against a format.

    Args:
        ranges: From `measure_ranges`, measured against the format.
        to: The format, or its name.
        title: First line; left empty, it names the dtype and the count.
        width: Columns at most; wide ranges put several exponents into one column.
    """
    fmt = find_format(to)
    fit = ranges.against(fmt)
    exponents = ranges.exponents
    floor, ceiling = round(math.log2(fmt.min_subnormal)), math.floor(math.log2(fmt.max)) + 1
    first = min([floor - 3, *exponents]) if exponents else floor - 3
    last = max([ceiling + 2, *exponents]) if exponents else ceiling + 2
    wide = -(-(last - first + 1) // width)
    columns: list[Column] = []
    for start in range(first, last + 1, wide):
        held = sum(exponents.get(e, 0) for e in range(start, start + wide))
        columns.append(Column(start, start + wide - 1, fit.share(held), zone_of(start + (wide - 1) // 2, fmt)))
    shares: dict[Zone, float] = {
        "zero": fit.share(fit.to_zero),
        "subnormal": fit.share(fit.subnormal),
        "normal": fit.share(fit.count - fit.to_zero - fit.subnormal - fit.overflow),
        "overflow": fit.share(fit.overflow),
    }
    named = title or f"{ranges.count:,} values of {ranges.source} against {fmt.name}"
    return Chart(named, fmt, tuple(columns), shares)


def marks_of(fmt: Format) -> tuple[tuple[int, str], ...]:
    """The three lines of a format: exponent at which each stands, and its name."""
    return (
        (round(math.log2(fmt.min_subnormal)), "floor"),
        (fmt.min_exponent, "subnormal line"),
        (math.floor(math.log2(fmt.max)) + 1, "ceiling"),
    )


def zone_of(exponent: float, fmt: Format) -> Zone:
    """What happens to most values of that exponent."""
    if exponent < math.log2(fmt.zero_at):
        return "zero"
    if exponent < fmt.min_exponent:
        return "subnormal"
    return "normal" if 2.0**exponent <= fmt.max else "overflow"


def _cell(level: float, row: int) -> str:
    """The character of one bar in one row, 0 the lowest; a share above zero is never invisible."""
    filled = level * _HEIGHT - row
    if filled >= 1:
        return _EIGHTHS[8]
    if filled <= 0:
        return _EIGHTHS[0]
    return _EIGHTHS[max(int(filled * 8), 1 if row == 0 else 0)]


def draw_axis(places: Sequence[tuple[int, int, str]], width: int) -> str:
    """A line with a foot under each mark, given as column, exponent and name."""
    line = ["─"] * width
    for position, _, _ in places:
        if position < width:
            line[position] = "┴"
    return "".join(line)


def draw_labels(places: Sequence[tuple[int, int, str]], width: int) -> str:
    """Names under the marks, moved left where they would leave the chart, on a second line where they would meet."""
    lines: list[str] = [""]
    for position, exponent, name in places:
        label = f"{name} 2^{exponent}"
        start = max(min(position, width - len(label)), 0)
        for i, line in enumerate(lines):
            if len(line) < start or not line:
                lines[i] = line.ljust(start) + label
                break
        else:
            lines.append(" " * start + label)
    return "\n".join(lines)


def _percent(share: float) -> str:
    if share == 0:
        return "0 %"
    return f"{percent(share, 1)}" if share >= 0.0005 else "< 0.1 %"


_TITLE = "The step in {format}: exponents of what each module wrote"
_LEGEND = "▀ forward  ▄ backward  █ both"
_CELLS = {(True, True): "█", (True, False): "▀", (False, True): "▄", (False, False): " "}
_PASSES = ("▀", "▄")
_ROOM = 0.075  # beyond the lines, as a share of what is between them: what is further out is drawn at the edge
_WORDS_FROM = 64  # columns of a terminal: below, a row beyond a limit gets a sign instead of words


@dataclass(frozen=True)
class _Scale:
    """Exponents laid out over columns."""

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

    shown = _shown(rows)
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


def _shown(rows: Sequence[Row]) -> Sequence[Row]:
    from floatline.diagnosis.headroom.step_rows import rows_that_matter  # torch comes with it

    return rows_that_matter(rows)


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


def _name(row: Row) -> str:
    return printable(row.module) or "(root)"


def _names(rows: Sequence[Row], longest: int) -> list[str]:
    """The names, cut at the front where they are long: their ends tell them apart."""
    names = [_name(row) for row in rows]
    return [name if len(name) <= longest else f"…{name[1 - longest :]}" for name in names]


def _note(row: Row) -> str:
    """What is wrong in which pass: '▀ overflow ▄ 98 % to 0'."""
    parts = zip(_PASSES, (row.forward, row.backward), strict=True)
    return " ".join(f"{sign} {_word(span)}" for sign, span in parts if span is not None and span.state != "fits")


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
