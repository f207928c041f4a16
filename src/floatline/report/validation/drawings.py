"""The pictures of a validation: as SVG, whose places are in percent to fit any width, and as a line of characters."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

_ROW, _TOP, _STRIP = 54, 38, 26
_APART = 18  # percent that the words of two margins need on a phone


@dataclass(frozen=True)
class Bar:
    """One interval: its words above it, and its verdict at the end of the line."""

    label: str
    verdict: str
    tone: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Piece:
    """One part of a stacked bar."""

    name: str
    share: float
    text: str


def frame(body: Sequence[str], *, height: float, summary: str) -> str:
    """An SVG as wide as its column, named in words for those who cannot see it."""
    return (
        f'<svg class="drawing" role="img" width="100%" height="{height:.0f}" aria-label="{html.escape(summary)}">'
        f"{''.join(body)}</svg>"
    )


def intervals_svg(bars: Sequence[Bar], *, margins: tuple[float, float], labels: tuple[str, str], summary: str) -> str:
    """Each look's interval against zero, delta1 and delta2.

    Args:
        bars: From the first look to the last.
        margins: delta1 and delta2.
        labels: Both as text.
        summary: The same in words.
    """
    first, last = span_of([end for bar in bars for end in (bar.low, bar.high)], margins)

    def at(value: float) -> float:
        return 100 * (min(max(value, first), last) - first) / (last - first)

    body: list[str] = []
    marks = ((0.0, "equal", "0"), (margins[0], "PASS to", labels[0]), (margins[1], "FAIL from", labels[1]))
    places = [at(value) for value, _, _ in marks]
    is_close = min(places[1] - places[0], places[2] - places[1]) < _APART
    anchors = ("end", "middle", "start") if is_close else ("middle",) * 3
    for place, anchor, (_, word, label) in zip(places, anchors, marks, strict=True):
        x = f"{place:.2f}%"
        body.append(f'<text class="muted" x="{x}" y="13" text-anchor="{anchor}">{word}</text>')
        body.append(f'<text x="{x}" y="29" text-anchor="{anchor}">{html.escape(label)}</text>')
    for number, bar in enumerate(bars):
        y = _TOP + _ROW * number
        body += _strip(at, y=y + 22, span=(first, last), margins=margins)
        body += _interval(bar, y=y, at=at, span=(first, last))
    return frame(body, height=_TOP + _ROW * len(bars), summary=summary)


def _strip(
    at: Callable[[float], float], *, y: float, span: tuple[float, float], margins: tuple[float, float]
) -> list[str]:
    """The ground of one interval: three zones, and lines where they meet."""
    zones = ((span[0], margins[0], "good"), (margins[0], margins[1], "warn"), (margins[1], span[1], "bad"))
    body = [
        f'<rect class="zone {tone}" x="{at(low):.2f}%" y="{y}" width="{at(high) - at(low):.2f}%" height="{_STRIP}"/>'
        for low, high, tone in zones
    ]
    for value, kind in ((0.0, "mark zero"), (margins[0], "mark"), (margins[1], "mark")):
        x = f"{at(value):.2f}%"
        body.append(f'<line class="{kind}" x1="{x}" x2="{x}" y1="{y}" y2="{y + _STRIP}"/>')
    return body


def _interval(bar: Bar, *, y: float, at: Callable[[float], float], span: tuple[float, float]) -> list[str]:
    low, high = at(bar.low), at(bar.high)
    line = y + 22 + _STRIP / 2
    body = [
        f'<text x="0" y="{y + 15}">{html.escape(bar.label)}</text>',
        f'<text class="word {bar.tone}" x="100%" y="{y + 15}" text-anchor="end">{html.escape(bar.verdict)}</text>',
        f'<line class="bar {bar.tone}" x1="{low:.2f}%" x2="{high:.2f}%" y1="{line}" y2="{line}"/>',
    ]
    for end, x, way in ((bar.low, low, 1), (bar.high, high, -1)):
        if span[0] <= end <= span[1]:
            body.append(f'<line class="bar {bar.tone}" x1="{x:.2f}%" x2="{x:.2f}%" y1="{line - 6}" y2="{line + 6}"/>')
        else:
            head = f'<path class="head {bar.tone}" d="M0 0 L{10 * way} -7 L{10 * way} 7 Z"/>'
            body.append(f'<svg class="beyond" aria-hidden="true" x="{x:.2f}%" y="{line}">{head}</svg>')
    if span[0] <= bar.mean <= span[1]:
        body.append(f'<circle class="dot {bar.tone}" cx="{at(bar.mean):.2f}%" cy="{line}" r="5"/>')
    return body


def speed_svg(rows: Sequence[tuple[str, float, str]], *, whisker: tuple[float, float], summary: str) -> str:
    """Time of a step as bars, the reference's above the candidate's; the whisker is the interval of the lower bar."""
    most = max([*(share for _, share, _ in rows), whisker[1]])
    body: list[str] = []
    for number, (name, share, text) in enumerate(rows):
        y = 46 * number
        kind = "reference" if number == 0 else "candidate"
        body += _labelled(name, text, y)
        body.append(
            f'<rect class="fill {kind}" x="0" y="{y + 22}" width="{100 * share / most:.2f}%" height="14" rx="2"/>'
        )
    line = 46 * len(rows) - 17
    low, high = (100 * end / most for end in whisker)
    one = 100 * rows[0][1] / most
    body.append(f'<line class="mark" x1="{one:.2f}%" x2="{one:.2f}%" y1="20" y2="{46 * len(rows) - 4}"/>')
    body.append(f'<line class="whisker" x1="{low:.2f}%" x2="{high:.2f}%" y1="{line}" y2="{line}"/>')
    body += [
        f'<line class="whisker" x1="{x:.2f}%" x2="{x:.2f}%" y1="{line - 5}" y2="{line + 5}"/>' for x in (low, high)
    ]
    return frame(body, height=46 * len(rows), summary=summary)


def stacks_svg(stacks: Sequence[tuple[str, str, Sequence[Piece]]], *, summary: str) -> str:
    """Stacked bars: name, total, and pieces whose shares are of the widest bar."""
    body: list[str] = []
    order: list[str] = []
    for _, _, pieces in stacks:
        order += [piece.name for piece in pieces if piece.name not in order]
    for number, (name, total, pieces) in enumerate(stacks):
        y, x = 46 * number, 0.0
        body += _labelled(name, total, y)
        for piece in pieces:
            title = html.escape(f"{piece.name}: {piece.text}")
            body.append(
                f'<rect class="piece p{order.index(piece.name) % 8}" x="{x:.2f}%" y="{y + 22}" '
                f'width="{100 * piece.share:.2f}%" height="16"><title>{title}</title></rect>'
            )
            x += 100 * piece.share
    return frame(body, height=46 * len(stacks), summary=summary)


def _labelled(name: str, text: str, y: float) -> list[str]:
    return [
        f'<text x="0" y="{y + 14}">{html.escape(_short(name))}</text>',
        f'<text class="number" x="100%" y="{y + 14}" text-anchor="end">{html.escape(text)}</text>',
    ]


def strips_svg(rows: Sequence[tuple[str, Sequence[tuple[int | None, str]]]], *, summary: str) -> str:
    """Heat strips: a row for each kind of number, a column for each module, from the first that runs to the last.

    Neighbours of one colour are one piece; what a pointer reads is over all strips, and once for each module.

    Args:
        rows: Name of the row, and for each module its level (0 fine, 1 look at it, 2 bad, None unknown) and its words.
        summary: The same in words.
    """
    body: list[str] = []
    columns = list(zip(*(cells for _, cells in rows), strict=True))
    wide = 100 / max(len(columns), 1)
    for number, (name, cells) in enumerate(rows):
        y, place = 44 * number, 0
        body.append(f'<text class="muted" x="0" y="{y + 14}">{html.escape(name)}</text>')
        for level, run in groupby(level for level, _ in cells):
            num, kind = len(list(run)), "none" if level is None else f"l{level}"
            x, width = f"{place * wide:.2f}%", f"{num * wide:.2f}%"
            body.append(f'<rect class="cell {kind}" x="{x}" y="{y + 20}" width="{width}" height="18"/>')
            if level == 2 and len(cells) <= 32:  # a sign beside the colour, where there is room for it
                body += [
                    f'<text class="sign" x="{(at + 0.5) * wide:.2f}%" y="{y + 33}" text-anchor="middle">!</text>'
                    for at in range(place, place + num)
                ]
            place += num
    for place, column in enumerate(columns):
        title = f"<title>{html.escape('; '.join(words for _, words in column))}</title>"
        body.append(f'<rect class="over" x="{place * wide:.2f}%" width="{wide:.2f}%" height="100%">{title}</rect>')
    return frame(body, height=44 * len(rows), summary=summary)


def _short(name: str, most: int = 34) -> str:
    """A name that leaves room for the number at the end of the line."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


_AXIS, _BAR, _MEAN = "─", "━", "●"
_ENDS = ("├", "┤")
_BEYOND = ("◂", "▸")
_MARKS = ("│", "┊", "┋")


def span_of(values: list[float], margins: tuple[float, float]) -> tuple[float, float]:
    """The part of the number line that is worth drawing: zero, both margins, and the values as far as they fit.

    What lies beyond one and a half times delta2 from the margins is drawn at the edge: the margins must stay apart.
    """
    second = margins[1]
    finite = [value for value in values if math.isfinite(value)]
    low = max(min([-0.5 * second, *finite]), -1.5 * second)
    high = min(max([1.5 * second, *finite]), 2.5 * second)
    room = 0.04 * (high - low)
    return low - room, high + room


def draw_line(
    mean: float, low: float, high: float, *, margins: tuple[float, float], labels: tuple[str, str], width: int = 44
) -> str:
    """The interval, and what its marks are: '│ 0  ┊ +1.00 %  ┋ +2.00 %'.

    Args:
        mean: Middle of the interval.
        low: Its lower end.
        high: Its upper end; an end that the line has no room for is an arrow.
        margins: delta1 and delta2, in the unit of the interval.
        labels: Both margins as text.
        width: Characters of the line itself.
    """
    first, last = span_of([low, high], margins)

    def place(value: float) -> int:
        share = (min(max(value, first), last) - first) / (last - first)
        return min(round(share * (width - 1)), width - 1)

    cells = [_AXIS] * width
    for at in range(place(low), place(high) + 1):
        cells[at] = _BAR
    cells[place(low)] = _ENDS[0] if low >= first else _BEYOND[0]
    cells[place(high)] = _ENDS[1] if high <= last else _BEYOND[1]
    for mark, value in zip(_MARKS, (0.0, *margins), strict=True):
        if cells[place(value)] in (_AXIS, _BAR):  # an end that meets a mark is the more important one
            cells[place(value)] = mark
    if first <= mean <= last:
        cells[place(mean)] = _MEAN
    return f"{''.join(cells)}  {_MARKS[0]} 0  {_MARKS[1]} {labels[0]}  {_MARKS[2]} {labels[1]}"
