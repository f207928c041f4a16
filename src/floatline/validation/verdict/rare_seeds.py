"""Rare bad seeds: what a few good ones leave open, and a single one that is far worse than the rest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from floatline.validation.verdict.curves import FROM, curve_excesses
from floatline.validation.verdict.pairs import Pair
from floatline.validation.verdict.terms import Terms, seeds_to_bound, share_unseen

# A seed is far worse if it fails by itself, lies so many spreads above the others, and is so many times as far off as
# FP32 is from nudged FP32 in any seed.
_SPREADS, _TIMES = 3.0, 3.0
# Where nothing is known of nudged FP32, so many spreads of at least so many others.
_ALONE, _OTHERS = 6.0, 4
_USUAL = 0.1


def describe_tail(num: int) -> str:
    """What so many seeds without a failure leave open, in words."""
    text = f"up to {100 * share_unseen(num):.0f} % of seeds could fail, and these {num} would not have shown it"
    enough = seeds_to_bound(_USUAL)
    return text if num >= enough else f"{text}; --rare {_USUAL:g} runs {enough} seeds, which leave {100 * _USUAL:g} %"


def find_far_worse(pairs: Sequence[Pair], nudged: Sequence[Pair], terms: Terms) -> dict[int, str]:
    """Seeds that are far worse than noise explains, and what is seen of each.

    Such a seed ends worse by more than the second margin, or its curve leaves FP32's by more than twice that. Of the
    way, nudged FP32 tells nothing: it has yet to go apart where a candidate has.

    Args:
        pairs: FP32 and the candidate.
        nudged: FP32 and nudged FP32; none where that arm was not run, or differs by nothing.
        terms: Scale and margins.
    """
    floors = [abs(pair.excess(terms)) for pair in nudged]
    ends = _find_outliers({pair.seed: pair.excess(terms) for pair in pairs}, floors, terms.margins[1])
    ways = _find_outliers(_widest(pairs, terms), [], 2 * terms.margins[1])
    return {
        **{seed: f"seed {seed} is {terms.show(excess)} on its way" for seed, excess in ways.items()},
        **{seed: f"seed {seed} ends {terms.show(excess)}" for seed, excess in ends.items()},
    }


def _widest(pairs: Sequence[Pair], terms: Terms) -> dict[int, float]:
    """The largest excess of each seed's later curve; none where there are no curves."""
    curves = curve_excesses(pairs, terms=terms)
    if isinstance(curves, str):
        return {}
    steps, excesses = curves
    late = [place for place, step in enumerate(steps) if step >= FROM * steps[-1]]
    return {pair.seed: float(row[late].max()) for pair, row in zip(pairs, excesses, strict=True)}


def _find_outliers(excesses: Mapping[int, float], floors: Sequence[float], least: float) -> dict[int, float]:
    found: dict[int, float] = {}
    for seed, excess in excesses.items():
        others = [other for number, other in excesses.items() if number != seed]
        if excess <= max(least, _TIMES * max(floors, default=0.0)) or len(others) < 2:
            continue
        far = statistics.stdev(others) * (_SPREADS if any(floors) else _ALONE)
        if excess > statistics.fmean(others) + far and (any(floors) or len(others) >= _OTHERS):
            found[seed] = excess
    return found
