"""The paired curves: a simultaneous band over a few checkpoints, and the drift of the last half."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from floatline.errors import ComparisonError
from floatline.validation.verdict.comparison import Band, Drift
from floatline.validation.verdict.pairs import Pair, excess
from floatline.validation.verdict.statistics import quantile
from floatline.validation.verdict.terms import Terms

Array = NDArray[np.float64]

NUM_CHECKPOINTS = 7
FROM = 0.3
"""Share of training before which a curve may wander: the first steps differ in every pair of runs."""


def curve_excesses(pairs: Sequence[Pair], *, terms: Terms) -> tuple[tuple[int, ...], Array] | str:
    """Excess of each pair at every step that all curves have, or the reason why there is none.

    Numerics:
        On the scale of the terms; a curve of the training loss is compared as ln(B/A), lower is better. Where the
        candidate is not finite at a step, its excess there is +inf.

    Returns:
        The steps, and one row for each pair; or one sentence.
    """
    kinds = {run.curve_of for pair in pairs for run in (pair.reference, pair.candidate) if run.curve}
    if not pairs or any(not run.curve for pair in pairs for run in (pair.reference, pair.candidate)):
        return "no curve was recorded in some run"
    if len(kinds) > 1:
        return "some curves hold the metric and some the loss"
    if kinds == {"loss"}:
        if terms.scale == "difference":
            return "the curves hold the loss, and the margins are in the unit of the metric"
        terms = Terms(metric="loss", margins=terms.margins)
    curves = [(dict(pair.reference.curve), dict(pair.candidate.curve)) for pair in pairs]
    shared = set(curves[0][0])
    for reference, candidate in curves:
        shared &= set(reference) & set(candidate)
    steps = tuple(sorted(shared))
    if not steps:
        return "the curves have no step in common"
    try:
        rows = [[excess(a[step], b[step], terms) for step in steps] for a, b in curves]
    except ComparisonError as error:
        return f"the curves cannot be compared: {error}"
    return steps, np.array(rows)


def simultaneous_band(steps: Sequence[int], excesses: Array, *, terms: Terms, curve_of: str) -> Band | None:
    """The mean excess at up to 7 checkpoints after 30 % of training, with a band that holds at all of them at once.

    Numerics:
        mean -+ t(1 - alpha / m, n - 1) * sd / sqrt(n) at m checkpoints (Bonferroni), so that each side holds
        everywhere with a chance of at least 1 - alpha, whatever the checkpoints have to do with each other.

    Args:
        steps: Rising steps of the columns.
        excesses: One row for each pair.
        terms: alpha, and delta2 for the limit.
        curve_of: 'metric' or 'loss', for the result.

    Returns:
        The band; None with fewer than 2 pairs, or no checkpoint that late.
    """
    late = [place for place, step in enumerate(steps) if step >= FROM * steps[-1]]
    if len(excesses) < 2 or not late:
        return None
    num, num_chosen = len(excesses), min(NUM_CHECKPOINTS, len(late))
    # The last one is always among them, and a single one is the last.
    chosen = [late[-1 - round(k * (len(late) - 1) / max(1, num_chosen - 1))] for k in reversed(range(num_chosen))]
    factor = quantile(1.0 - terms.alpha / len(chosen), float(num - 1)) / math.sqrt(num)
    mean, half = _mean_and_half_width(excesses[:, chosen], factor)
    return Band(
        steps=tuple(steps[place] for place in chosen),
        mean=tuple(mean.tolist()),
        low=tuple((mean - half).tolist()),
        high=tuple((mean + half).tolist()),
        limit=2 * terms.margins[1],
        curve_of=curve_of,
    )


def late_peak(losses: Sequence[float]) -> float | None:
    """The highest finite loss after 30 % of training; None where there is none."""
    return max(filter(math.isfinite, losses[int(FROM * len(losses)) :]), default=None)


def _mean_and_half_width(excesses: Array, factor: float) -> tuple[Array, Array]:
    """Mean of each column, and factor * sd; a column with +inf has mean +inf and no width."""
    lost = ~np.isfinite(excesses).all(axis=0)
    held = np.where(lost, 0.0, excesses)
    mean = np.where(lost, np.inf, held.mean(axis=0))
    return mean, factor * held.std(axis=0, ddof=1)


def fit_drift(steps: Sequence[int], excesses: Array, *, terms: Terms) -> Drift | None:
    """Regress the excess on ln(step) over the last half of training, and follow the line to the planned horizon.

    Numerics:
        One least-squares line for each pair; the mean slope's lower bound is that of a one-sided t interval over
        the pairs' slopes at alpha, so that neighbouring checkpoints need not be independent.

    Returns:
        The drift; None with fewer than 2 pairs, fewer than 3 checkpoints in the last half, or a value that is
        not finite.
    """
    late = [place for place, step in enumerate(steps) if step >= 0.5 * steps[-1] and step > 0]
    values = excesses[:, late]
    if len(excesses) < 2 or len(late) < 3 or not np.isfinite(values).all():
        return None
    at = np.log([float(steps[place]) for place in late])
    centred = at - at.mean()
    slopes = values @ centred / (centred @ centred)
    horizon = max(terms.horizon or 0, steps[-1])
    reached = values.mean(axis=1) + slopes * (math.log(horizon) - at.mean())
    num = len(slopes)
    half = quantile(1.0 - terms.alpha, float(num - 1)) / math.sqrt(num) * float(slopes.std(ddof=1))
    return Drift(
        slope=float(slopes.mean()),
        slope_low=float(slopes.mean()) - half,
        horizon=horizon,
        at_horizon=float(reached.mean()),
        limit=terms.margins[0],
        steps=tuple(steps[place] for place in late),
    )
