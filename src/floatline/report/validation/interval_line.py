"""One line of characters: an interval against zero and the two margins."""

from __future__ import annotations

import math

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
