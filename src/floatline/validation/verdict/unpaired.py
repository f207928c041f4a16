"""Runs whose seeds do not match: the same verdict from the wider interval that independent arms have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from floatline.errors import ComparisonError
from floatline.validation.verdict.comparison import Comparison, Gate, Look
from floatline.validation.verdict.gates import (
    check_completed,
    check_late_enough,
    check_learned,
    check_reference_finite,
    check_skipped,
    check_steps,
    check_weights,
)
from floatline.validation.verdict.notes import flags_of, notes_of
from floatline.validation.verdict.pairs import REFERENCE, ArmRun, Pair, badness, nothing_left
from floatline.validation.verdict.power import judge_interval
from floatline.validation.verdict.rare_seeds import find_far_worse_alone
from floatline.validation.verdict.resolution import least_spread
from floatline.validation.verdict.statistics import Array, outward, quantile
from floatline.validation.verdict.terms import LOOKS, Terms
from floatline.validation.verdict.verdict import NO_SPREAD


def unpaired_interval(
    reference: Sequence[float], candidate: Sequence[float], *, alpha: float = 0.05, least_sd: float = 0.0
) -> Look:
    """Difference of two means of independent values, with the interval that independent arms have.

    Numerics:
        mean -+ t(1 - alpha, n - 1) * sqrt(s1^2 / n1 + s2^2 / n2), with n of the smaller arm, as Hsu has it: Welch's
        degrees pass too often where noise is skewed. The ends are moved outwards as those of pairs are, see
        `statistics.outward`: the skewness of the difference is its third cumulant, m2 / n2^2 - m1 / n1^2 with the
        third moments m, over the 3/2th power of its variance. `sd` of the result is the root, and `factor` the t: one
        look, so that no correction for several is needed. The verdict is left at INCONCLUSIVE.
        Checked by tests/validation/verdict/test_noise.py.

    Args:
        reference: Values of `pairs.badness`; 2 or more.
        candidate: The same of the candidate.
        alpha: Chance of each one-sided error, where noise is not skewed.
        least_sd: The spread of each arm counts as this at least: see `resolution.least_spread`.
    """
    arms = [np.asarray(values, dtype=np.float64) for values in (reference, candidate)]
    parts = [max(float(np.var(values, ddof=1)), least_sd**2) / len(values) for values in arms]
    variance, mean = sum(parts), float(arms[1].mean() - arms[0].mean())
    num = min(map(len, arms))
    if not variance:
        return Look(num, mean, 0.0, 0.0, mean, mean, "INCONCLUSIVE", 0.0)
    factor, root = quantile(1.0 - alpha, float(num - 1)), math.sqrt(variance)
    skew = _skewness_of_difference(*arms) * math.sqrt(num)
    low, high = (float(outward(factor, num, sign * skew)) for sign in (-1.0, 1.0))
    return Look(num, mean, root, factor, mean - low * root, mean + high * root, "INCONCLUSIVE", skew)


def _skewness_of_difference(reference: Array, candidate: Array) -> float:
    """Third cumulant of the difference of two means, over the 3/2th power of its variance; 0 without any spread."""
    thirds = [float(((one - one.mean()) ** 3).mean()) / len(one) ** 2 for one in (reference, candidate)]
    variance = sum(float(one.var()) / len(one) for one in (reference, candidate))
    return (thirds[1] - thirds[0]) / variance**1.5 if variance else 0.0


def decide_unpaired(runs: Sequence[ArmRun], *, candidate: str, terms: Terms, reference: str = REFERENCE) -> Comparison:
    """The verdict from finished runs of two arms that share no seeds.

    One look at all runs there are; the looks of the terms do not matter. The gates that need a pair (same start,
    arms differ, noise floor) are not there, and a candidate that diverged is a FAIL where no reference did.

    Raises:
        ComparisonError: An arm has no runs.
    """
    ours, theirs = ([run for run in runs if run.arm == arm] for arm in (reference, candidate))
    if not ours or not theirs:
        raise ComparisonError(f"Arm {reference if not ours else candidate!r} has no runs. Give both arms.")
    # Gates look at runs, not at what pairs them: each run stands in one pair at least.
    pairs = tuple(Pair(ours[k % len(ours)], theirs[k % len(theirs)]) for k in range(max(len(ours), len(theirs))))
    setup = (check_completed(pairs), check_steps(pairs), check_weights(pairs), check_reference_finite(pairs, terms))
    once = pairs[: len(ours)]  # each run of the reference once
    gates = (*setup, check_learned(once, terms), check_late_enough(once, terms), check_skipped(pairs))
    gates = (*gates, _check_scale(ours, theirs, terms), _check_numbers(len(ours), len(theirs)))
    seeds = tuple(sorted({run.seed for run in (*ours, *theirs)}))
    result = Comparison("REFUSED", "", reference, candidate, terms, None, None, seeds, gates=gates, paired=False)
    lost = sum(run.lost or nothing_left(run.metric, terms) for run in theirs)
    failed = result.failed_gates
    if (
        lost
        and not any(gate.passed is False for gate in setup)
        and not any(nothing_left(r.metric, terms) for r in ours)
    ):
        result = replace(
            result, verdict="FAIL", reason=f"it diverged or lost everything in {lost} of {len(theirs)} runs"
        )
    elif failed:
        result = replace(result, reason=failed[0].seen)
    else:
        result = _with_interval(result, ours, theirs)
    return replace(result, flags=flags_of(result, pairs), notes=_notes(result, runs, pairs))


def _with_interval(result: Comparison, ours: list[ArmRun], theirs: list[ArmRun]) -> Comparison:
    terms = result.terms
    values = [[badness(run.metric, terms) for run in runs] for runs in (ours, theirs)]
    least = least_spread([run.metric for run in (*ours, *theirs)], terms) / math.sqrt(2.0)  # of one arm, not of two
    look = unpaired_interval(*values, alpha=terms.alpha, least_sd=least)
    verdict = judge_interval(look.low, look.high, terms=terms, last=True) if look.sd else "INCONCLUSIVE"
    low, high = terms.show(look.low), terms.show(look.high)
    first, second = (terms.size(margin) for margin in terms.margins)
    reason = f"the interval of unpaired runs is [{low}, {high}], against margins of {first} and {second}"
    if not look.sd:
        reason = NO_SPREAD
    far_worse = find_far_worse_alone(
        {run.seed: value for run, value in zip(theirs, values[1], strict=True)}, values[0], terms
    )
    if verdict == "PASS" and far_worse:
        verdict = "MARGINAL"
        reason = f"it is within {first} on average, but {', '.join(far_worse.values())}, far more than the other runs"
    return replace(
        result,
        verdict=verdict,
        reason=reason,
        difference=look.mean,
        interval=(look.low, look.high),
        looks=(replace(look, verdict=verdict),),
    )


def _notes(result: Comparison, runs: Sequence[ArmRun], pairs: Sequence[Pair]) -> tuple[str, ...]:
    why = (
        "the seeds do not match, so that the noise of both arms counts in full: pair the seeds for a narrower interval"
    )
    return (why, *notes_of(result, runs, pairs))


def _check_numbers(num_ours: int, num_theirs: int) -> Gate:
    text = f"{num_ours} runs of the reference and {num_theirs} of the candidate"
    if min(num_ours, num_theirs) >= LOOKS[0]:
        return Gate("enough-seeds", True, text)
    return Gate("enough-seeds", False, text, f"Give at least {LOOKS[0]} runs of each arm.")


def _check_scale(ours: list[ArmRun], theirs: list[ArmRun], terms: Terms) -> Gate:
    try:
        for run in (*ours, *theirs):
            if not run.lost and not run.error and not (run.arm != ours[0].arm and nothing_left(run.metric, terms)):
                badness(run.metric, terms)
    except ComparisonError as error:
        seen, _, advice = str(error).partition(". ")
        return Gate("scale-fits", False, seen, advice)
    return Gate("scale-fits", True, f"every {terms.metric} has a value on the {terms.scale} scale")
