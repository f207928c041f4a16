"""The floatline chart: a tensor's exponents drawn against a format's floor, subnormal line and ceiling."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from floatline.formats import Format, find_format

if TYPE_CHECKING:
    from rich.text import Text

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
    return f"{share:.1%}".replace("%", " %") if share >= 0.0005 else "< 0.1 %"
