"""The curves of a validation, laid out for the page's chart: one column of steps, null where a run has no value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from floatline.validation.verdict.curves import curve_excesses
from floatline.validation.verdict.pairs import ArmRun, pair_up

if TYPE_CHECKING:
    from floatline.validation.verdict.comparison import Comparison

MOST_POINTS = 300
"""Points of one curve in the page; more cannot be told apart, and make it heavy."""

Values = list[float | None]


def curves_of(comparison: Comparison, runs: Sequence[ArmRun]) -> dict[str, Any] | None:
    """Numbers and names for the chart; None where no run of both arms has a curve.

    Numerics:
        The mean of an arm stands where every run of it has a finite value. The excess is that of
        `validate.curves.curve_excesses`. Values keep 7 significant digits.
    """
    used = set(comparison.seeds)
    ours, theirs = (
        [run for run in runs if run.arm == arm and run.seed in used and run.curve]
        for arm in (comparison.reference, comparison.candidate)
    )
    if not ours or not theirs:
        return None
    steps = sorted({step for run in (*ours, *theirs) for step, _ in run.curve})
    kept = _thin(steps, comparison.band.steps if comparison.band else ())
    seeds = sorted({run.seed for run in (*ours, *theirs)})
    return {
        "steps": kept,
        "thinned": len(kept) < len(steps),
        "num_steps": len(steps),
        "of": "training loss" if ours[0].curve_of == "loss" else comparison.terms.metric,
        "seeds": seeds,
        "arms": [_arm(arm, kept, seeds) for arm in (ours, theirs)],
        "excess": _excess(comparison, runs, kept, seeds),
    }


def _arm(runs: list[ArmRun], steps: list[int], seeds: list[int]) -> dict[str, Any]:
    rows = {run.seed: _row(dict(run.curve), steps) for run in runs}
    return {
        "name": runs[0].arm,
        "mean": _mean([rows[seed] for seed in rows]),
        "seeds": [rows.get(seed) for seed in seeds],
    }


def _excess(
    comparison: Comparison, runs: Sequence[ArmRun], steps: list[int], seeds: list[int]
) -> dict[str, Any] | None:
    """Excess of each seed and its mean, the band at its checkpoints, and what they are held against."""
    if not comparison.paired:
        return None
    pairs = [
        pair
        for pair in pair_up(runs, candidate=comparison.candidate, reference=comparison.reference)
        if pair.seed in comparison.seeds
    ]
    found = curve_excesses(pairs, terms=comparison.terms)
    if isinstance(found, str):
        return None
    at, excesses = found
    rows = {
        pair.seed: _row(dict(zip(at, row.tolist(), strict=True)), steps)
        for pair, row in zip(pairs, excesses, strict=True)
    }
    band = comparison.band
    return {
        "mean": _mean(list(rows.values())),
        "seeds": [rows.get(seed) for seed in seeds],
        "low": _row(dict(zip(band.steps, band.low, strict=True)), steps) if band else None,
        "high": _row(dict(zip(band.steps, band.high, strict=True)), steps) if band else None,
        "limit": _plain(2 * comparison.terms.margins[1]),
        "unit": comparison.terms.unit,
    }


def _row(values: dict[int, float], steps: list[int]) -> Values:
    return [_plain(values[step]) if step in values else None for step in steps]


def _mean(rows: list[Values]) -> Values:
    columns = zip(*rows, strict=True)
    return [
        None
        if any(value is None for value in column)
        else _plain(math.fsum(v for v in column if v is not None) / len(column))
        for column in columns
    ]


def _plain(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _thin(steps: list[int], checkpoints: Sequence[int]) -> list[int]:
    """At most `MOST_POINTS`, evenly, the ends and the checkpoints always among them."""
    if len(steps) <= MOST_POINTS:
        return steps
    stride = (len(steps) - 1) / (MOST_POINTS - 1)
    chosen = {steps[round(place * stride)] for place in range(MOST_POINTS)}
    return sorted(chosen | set(checkpoints))
