"""The curves of runs, laid out for the page's charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from floatline.ledger.progress import Spread
from floatline.report.run_facts import RunFacts

_MARKED = ("rollback", "escalation", "stop", "lr-cut", "regime-change")
_MOST_MARKS = 40
_WIDE = 30.0  # losses whose highest is so many times the lowest are drawn over their logarithm


def curves_of(runs: Sequence[RunFacts]) -> dict[str, Any] | None:
    """Numbers and names for the charts; None where no run has a step.

    Numerics:
        A point is the mean of the finite values of its steps, null where there are none; low and high are the lowest
        and the highest of them. Values keep 7 significant digits.
    """
    drawn = [run for run in runs if run.stretches]
    if not drawn:
        return None
    lows = [stretch.loss.low for run in drawn for stretch in run.stretches if stretch.loss.num]
    highs = [stretch.loss.mean for run in drawn for stretch in run.stretches if stretch.loss.num]
    return {
        "runs": [_run(run) for run in drawn],
        "logLoss": bool(lows) and min(lows) > 0 and max(highs) / min(lows) > _WIDE,
        "perPoint": max(run.steps_per_stretch for run in drawn),
    }


def _run(run: RunFacts) -> dict[str, Any]:
    stretches = run.stretches
    marks = [[event.attempt, event.event] for event in run.events if event.event in _MARKED]
    return {
        "name": run.name,
        "steps": [stretch.last for stretch in stretches],
        "loss": _means([stretch.loss for stretch in stretches]),
        "lossLow": [_plain(stretch.loss.low) for stretch in stretches],
        "lossHigh": [_plain(stretch.loss.high) for stretch in stretches],
        "norm": _positive(_means([stretch.norm for stretch in stretches])),
        "scale": _positive([_plain(stretch.scale.last) for stretch in stretches]),
        "lr": _known([_plain(stretch.lr.last) for stretch in stretches]),
        "lost": _known([_plain(stretch.lost.last) for stretch in stretches]),
        # By place: how many were skipped there, and in words.
        "skips": [
            [place, sum(stretch.skipped.values()), ", ".join(f"{n:,} {why}" for why, n in stretch.skipped.items())]
            for place, stretch in enumerate(stretches)
            if stretch.skipped
        ],
        "nonfinite": [
            [place, stretch.loss.num_nan + stretch.loss.num_inf]
            for place, stretch in enumerate(stretches)
            if stretch.loss.num_nan + stretch.loss.num_inf
        ],
        "marks": marks[-_MOST_MARKS:],
    }


def _means(spreads: Sequence[Spread]) -> list[float | None]:
    return [_plain(spread.mean) if spread.num else None for spread in spreads]


def _positive(values: list[float | None]) -> list[float | None] | None:
    """For an axis of powers, which has no place for zero; None where nothing is left."""
    return _known([None if value is None or value <= 0 else value for value in values])


def _known(values: list[float | None]) -> list[float | None] | None:
    return values if any(value is not None for value in values) else None


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")
