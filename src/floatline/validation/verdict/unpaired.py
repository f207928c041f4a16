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
from floatline.validation.verdict.statistics import quantile
from floatline.validation.verdict.terms import LOOKS, Terms


def welch_interval(reference: Sequence[float], candidate: Sequence[float], *, alpha: float = 0.05) -> Look:
    """Difference of two means of independent values, with Welch's interval.

    Numerics:
        mean -+ t(1 - alpha, v) * sqrt(s1^2 / n1 + s2^2 / n2), with v by Welch and Satterthwaite. `sd` of the result
        is the root, and `factor` the t: one look, so that no correction for several is needed. Where both arms have
        no spread at all the interval has no width. The verdict is left at INCONCLUSIVE.

    Args:
        reference: Values of `pairs.badness`; 2 or more.
        candidate: The same of the candidate.
        alpha: Chance of each one-sided error.
    """
    parts = [(float(np.var(values, ddof=1)) / len(values), len(values)) for values in (reference, candidate)]
    variance = sum(part for part, _ in parts)
    mean = float(np.mean(candidate)) - float(np.mean(reference))
    if variance > 0:
        freedom = variance**2 / sum(part**2 / (num - 1) for part, num in parts)
    else:
        freedom = float(len(reference) + len(candidate) - 2)
    factor, root = quantile(1.0 - alpha, freedom), math.sqrt(variance)
    num = min(len(reference), len(candidate))
    return Look(num, mean, root, factor, mean - factor * root, mean + factor * root, "INCONCLUSIVE")


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
    look = welch_interval(
        [badness(run.metric, terms) for run in ours], [badness(run.metric, terms) for run in theirs], alpha=terms.alpha
    )
    verdict = judge_interval(look.low, look.high, terms=terms, last=True)
    low, high = terms.show(look.low), terms.show(look.high)
    first, second = (terms.size(margin) for margin in terms.margins)
    reason = f"the interval of unpaired runs is [{low}, {high}], against margins of {first} and {second}"
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
