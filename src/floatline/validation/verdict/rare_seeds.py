"""Rare bad seeds: what a few good ones leave open, and a single one that is far worse than the rest."""

from __future__ import annotations

import math
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
# A spike is so many times the highest loss of FP32, and so large a share of updates left out is more than a search.
_SPIKE, _LEFT_OUT = 1.5, 0.01


def describe_tail(num: int, *, asks: bool = True) -> str:
    """What so many seeds without a failure leave open, in words.

    Args:
        num: Seeds.
        asks: Whether the runs are those of a study, which can be asked for more.
    """
    text = f"up to {100 * share_unseen(num):.0f} % of seeds could fail, and these {num} would not have shown it"
    enough = seeds_to_bound(_USUAL)
    if num >= enough:
        return text
    more = f"--rare {_USUAL:g} runs {enough} seeds, which leave" if asks else f"{enough} seeds would leave"
    return f"{text}; {more} {100 * _USUAL:g} %"


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


def find_early_signs(pairs: Sequence[Pair], nudged: Sequence[Pair]) -> dict[int, str]:
    """Seeds whose training shows trouble that the others' does not, whatever they ended at, and what is seen of each.

    Args:
        pairs: FP32 and the candidate.
        nudged: FP32 and nudged FP32, whose spikes are noise.
    """
    peaks = _peaks(pairs)
    spikes = _find_outliers(peaks, [abs(value) for value in _peaks(nudged).values()], math.log(_SPIKE))
    runs = {pair.seed: pair.candidate for pair in pairs}
    shares = {seed: run.skipped / run.steps for seed, run in runs.items() if run.skipped is not None and run.steps}
    usual = statistics.median(shares.values()) if shares else 0.0
    left_out = _find_outliers({seed: share - usual for seed, share in shares.items()}, [], _LEFT_OUT)
    spiked = "seed {}'s training loss rises to {:.1f} times the highest of FP32"
    return {
        **{seed: f"seed {seed} left out {runs[seed].skipped} of {runs[seed].steps} updates" for seed in left_out},
        **{seed: spiked.format(seed, math.exp(peaks[seed])) for seed in spikes},
    }


def _peaks(pairs: Sequence[Pair]) -> dict[int, float]:
    """How far the highest training loss lies above FP32's, as a logarithm, where both are known."""
    peaks = {pair.seed: (pair.reference.peak or 0.0, pair.candidate.peak or 0.0) for pair in pairs}
    return {seed: math.log(b / a) for seed, (a, b) in peaks.items() if a > 0 and b > 0}


def find_far_worse_alone(excesses: Mapping[int, float], reference: Sequence[float], terms: Terms) -> dict[int, str]:
    """Runs that are far worse than noise explains, of arms that share no seeds: FP32's own scatter is what it shows.

    Args:
        excesses: `pairs.badness` of each run of the candidate, by its number.
        reference: The same of the reference's runs.
        terms: Scale and margins.
    """
    middle = statistics.fmean(reference)
    floors = [abs(value - middle) for value in reference]
    found = _find_outliers({key: value - middle for key, value in excesses.items()}, floors, terms.margins[1])
    return {key: f"run {key} ends {terms.show(excess)}" for key, excess in found.items()}


def _widest(pairs: Sequence[Pair], terms: Terms) -> dict[int, float]:
    """The largest excess of each seed's later curve; none where there are no curves."""
    curves = curve_excesses(pairs, terms=terms)
    if isinstance(curves, str):
        return {}
    steps, excesses = curves
    late = [place for place, step in enumerate(steps) if step >= FROM * steps[-1]]
    return {pair.seed: float(row[late].max()) for pair, row in zip(pairs, excesses, strict=True)}


def _find_outliers(excesses: Mapping[int, float], floors: Sequence[float], least: float) -> dict[int, float]:
    """The numbers that are far above the others; as long as they are fewer than those, they do not hide each other."""
    far = max(least, _TIMES * max(floors, default=0.0))
    suspects = {seed: excess for seed, excess in excesses.items() if excess > far}
    others = [excess for seed, excess in excesses.items() if seed not in suspects]
    known = any(floors)
    if len(others) < (2 if known else _OTHERS) or len(others) <= len(suspects):
        return {}
    limit = statistics.fmean(others) + statistics.stdev(others) * (_SPREADS if known else _ALONE)
    return {seed: excess for seed, excess in suspects.items() if excess > limit}
