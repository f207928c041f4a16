"""The losses of short runs in one picture: FP32, as it was, and rescued."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from floatline.report.document.document import Drawing
from floatline.report.validation.drawings import frame
from floatline.report.validation.texts import show_value

_HEIGHT, _TOP, _BELOW = 200, 22, 22
_MOST_POINTS = 200


def draw_losses(curves: Mapping[str, Sequence[float]]) -> Drawing | None:
    """A curve for each run, with a cross where its loss is not finite for the first time; None without a finite loss.

    Args:
        curves: Losses step by step, by the name of the run.
    """
    finite = [loss for losses in curves.values() for loss in losses if math.isfinite(loss)]
    if not finite:
        return None
    low, high = _limits(curves, finite)
    steps = max(len(losses) for losses in curves.values())

    def x(step: int) -> float:
        return 100 * step / max(1, steps - 1)

    def y(loss: float) -> float:
        share = (min(max(loss, low), high) - low) / ((high - low) or 1.0)
        return _TOP + _HEIGHT * (1 - share)

    # The numbers stand outside of the two lines, and so on no curve.
    body = [f'<line class="mark" x1="0" x2="100%" y1="{y(v):.1f}" y2="{y(v):.1f}"/>' for v in (low, high)]
    bottom = _TOP + _HEIGHT + 15
    body += [
        f'<text class="muted" x="0" y="{_TOP - 9}">loss {high:.4g}</text>',
        f'<text class="muted" x="0" y="{bottom}">{low:.4g} at step 1</text>',
        f'<text class="muted" x="100%" y="{bottom}" text-anchor="end">step {steps:,}</text>',
    ]
    for number, losses in enumerate(curves.values()):
        points = [(x(i), y(v)) for i, v in _thin(losses) if math.isfinite(v)]
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            body.append(f'<line class="run p{number}" x1="{x1:.2f}%" y1="{y1:.1f}" x2="{x2:.2f}%" y2="{y2:.1f}"/>')
        bad = find_bad(losses)
        if bad is not None:
            at = x(bad)
            anchor = "start" if at < 3 else "end" if at > 97 else "middle"
            body.append(f'<text class="run p{number}" x="{at:.2f}%" y="{_TOP + 8}" text-anchor="{anchor}">✕</text>')
    summary = "; ".join(f"{name}: {_say(losses)}" for name, losses in curves.items())
    svg = frame(body, height=_HEIGHT + _TOP + _BELOW, summary=summary)
    return Drawing(svg, f"Losses over {steps} steps. {summary}.", legend=tuple(curves))


def _limits(curves: Mapping[str, Sequence[float]], finite: Sequence[float]) -> tuple[float, float]:
    """Between what the first run needs, and as much above: a run that diverges leaves the picture at its top."""
    first = [loss for loss in next(iter(curves.values())) if math.isfinite(loss)] or list(finite)
    low, high = min(first), max(first)
    return min(low, *finite), min(max(high, *finite), high + (high - low))


def _thin(losses: Sequence[float]) -> list[tuple[int, float]]:
    every = max(1, len(losses) // _MOST_POINTS)
    return [(step, loss) for step, loss in enumerate(losses) if step % every == 0 or step == len(losses) - 1]


def find_bad(losses: Sequence[float]) -> int | None:
    """The first step whose loss is not finite."""
    return next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)


def _say(losses: Sequence[float]) -> str:
    if not losses:
        return "no step was made"
    bad = find_bad(losses)
    if bad is not None:
        return f"not finite from step {bad} on" if bad else "not finite from the start"
    return f"from {show_value(losses[0])} to {show_value(losses[-1])}"
