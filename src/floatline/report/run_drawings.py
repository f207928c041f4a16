"""Layers against a format's limits as SVG: places in percent, so that it fits any width and the type keeps its size."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from floatline.formats import Format
from floatline.report.chart import marks_of
from floatline.report.run_facts import LayerFacts
from floatline.report.run_texts import headroom_of, tone_of, trouble_of
from floatline.report.validation_drawings import frame

_ROW, _TOP, _STRIP = 46, 40, 16
_ROOM = 0.075  # beyond the limits, as a share of what is between them
_LONGEST = 24  # characters of a name that leave room for the words at the end of the line, on a phone too


def layers_svg(layers: Sequence[LayerFacts], fmt: Format, *, summary: str) -> str:
    """Each layer's norm, scaled as the backward pass held it, between the format's floor and its ceiling.

    Args:
        layers: From the first row to the last.
        fmt: The format.
        summary: The same in words.
    """
    floor, normal, ceiling = (exponent for exponent, _ in marks_of(fmt))
    room = _ROOM * (ceiling - floor)
    first, last = floor - room, ceiling + room

    def at(exponent: float) -> float:
        return 100 * (min(max(exponent, first), last) - first) / (last - first)

    body: list[str] = []
    for exponent, word in ((floor, "floor"), (normal, "subnormal"), (ceiling, "ceiling")):
        x = f"{at(exponent):.2f}%"
        body.append(f'<text class="muted" x="{x}" y="13" text-anchor="middle">{word}</text>')
        body.append(f'<text x="{x}" y="29" text-anchor="middle">2^{exponent}</text>')
    zones = ((first, floor, "bad"), (floor, normal, "warn"), (normal, ceiling, "good"), (ceiling, last, "bad"))
    for number, layer in enumerate(layers):
        y = _TOP + _ROW * number
        body += _labels(layer, y + 14)
        body += [
            f'<rect class="zone {kind}" x="{at(low):.2f}%" y="{y + 20}" width="{at(high) - at(low):.2f}%" '
            f'height="{_STRIP}"/>'
            for low, high, kind in zones
        ]
        body += [
            f'<line class="mark" x1="{at(limit):.2f}%" x2="{at(limit):.2f}%" y1="{y + 20}" y2="{y + 20 + _STRIP}"/>'
            for limit in (floor, normal, ceiling)
        ]
        body += _track(layer, y + 20 + _STRIP / 2, at)
    return frame(body, height=_TOP + _ROW * len(layers), summary=summary)


def _labels(layer: LayerFacts, y: float) -> list[str]:
    name = layer.name if len(layer.name) <= _LONGEST else f"…{layer.name[1 - _LONGEST :]}"
    # Few words: on a phone they must not meet the name.
    bad = f"{layer.num_nonfinite:,}× inf/NaN" if layer.num_nonfinite else ""
    near = "unknown" if (layer.headroom or 0.0) < 0 else headroom_of(layer)
    words = f"{near.removesuffix(' doublings')}, {bad}" if bad and layer.highest is not None else bad or near
    full = ", ".join(filter(None, (headroom_of(layer), trouble_of(layer))))
    return [
        f'<text x="0" y="{y}">{html.escape(name)}<title>{html.escape(layer.name)}</title></text>',
        f'<text class="word {tone_of(layer)}" x="100%" y="{y}" text-anchor="end">{html.escape(words)}'
        f"<title>{html.escape(full)}</title></text>",
    ]


def _track(layer: LayerFacts, y: float, at: Callable[[float], float]) -> list[str]:
    """A line from the lowest norm to the highest, and a dot at the newest."""
    body: list[str] = []
    tone = tone_of(layer)
    if layer.lowest and layer.highest:
        low, high = at(math.log2(layer.lowest)), at(math.log2(layer.highest))
        body.append(f'<line class="bar {tone}" x1="{low:.2f}%" x2="{max(high, low + 0.3):.2f}%" y1="{y}" y2="{y}"/>')
    if layer.newest and math.isfinite(layer.newest):
        body.append(f'<circle class="dot {tone}" cx="{at(math.log2(layer.newest)):.2f}%" cy="{y}" r="5"/>')
    return body
