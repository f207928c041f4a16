"""What a reader must know beside a verdict: flags that qualify it, and notes that explain it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from floatline.validation.verdict.comparison import Comparison
from floatline.validation.verdict.pairs import ArmRun, Pair, unpaired_seeds
from floatline.validation.verdict.rare_seeds import describe_tail
from floatline.validation.verdict.statistics import follows
from floatline.validation.verdict.terms import LANGUAGE_MODEL_MARGINS, Terms

NEAR_ONE = 0.9
_FOLLOWS = 2.0  # standard errors of a lag-1 autocorrelation


def flags_of(comparison: Comparison, pairs: Sequence[Pair], *, signs: Sequence[str] = ()) -> tuple[str, ...]:
    """What qualifies a PASS; `signs` are of `rare_seeds.find_early_signs`."""
    if comparison.verdict != "PASS":
        return ()
    flags: list[str] = []
    if comparison.suspicious:
        flags.append("suspiciously better: precision does not explain it, so look for another difference of the arms")
    tried = len({pair.candidate.seed for pair in pairs})
    flags.append(describe_tail(tried, asks=len(comparison.terms.looks) > 1 and comparison.paired))
    flags += [f"{sign}, unlike the other seeds: a sign of bad ones that the metric does not show" for sign in signs]
    num = len(comparison.excesses)
    if num > 2 and (share := follows(np.array(comparison.excesses))) > _FOLLOWS / math.sqrt(num):
        flags.append(
            f"the difference of a seed follows the last one's ({share:.1f} of it): the interval takes seeds to be "
            "independent, so look for what drifts from run to run"
        )
    if unchecked := [gate.name for gate in comparison.gates if gate.passed is None]:
        flags.append(f"not checked, for want of what they need: {', '.join(unchecked)}")
    steps = [run.last_step for pair in pairs for run in (pair.reference, pair.candidate) if run.last_step is not None]
    if steps:
        flags.append(f"a PASS holds to the tested horizon of {min(steps):,} steps")
    else:
        flags.append("a PASS holds to the tested horizon, and the number of steps was not recorded")
    if (
        comparison.terms.horizon is not None
        and steps
        and comparison.terms.horizon > min(steps)
        and not comparison.drift
    ):
        flags.append(f"nothing is known of the way to {comparison.terms.horizon:,} steps: no drift could be fitted")
    return tuple(flags)


def notes_of(
    comparison: Comparison, runs: Sequence[ArmRun], pairs: Sequence[Pair], *, no_curves: str = ""
) -> tuple[str, ...]:
    """What is worth knowing, and changes nothing."""
    terms = comparison.terms
    notes = [describe_scale(terms)]
    if terms.language_model and terms.margins[0] > LANGUAGE_MODEL_MARGINS[0]:
        notes.append(
            "1 % of a language model's loss is worth about 20 % of the compute: "
            "margins of 0.25 % and 0.5 % fit it better"
        )
    if terms.higher_is_better and terms.scale == "log" and pairs:
        notes += _near_one(pairs, terms)
    alone = unpaired_seeds(runs, candidate=comparison.candidate, reference=comparison.reference)
    if comparison.paired and alone:
        notes.append(f"{_listed(alone)} in one arm only, and not used")
    used = set(comparison.seeds)
    both = {run.seed for run in runs if run.arm == comparison.reference} & {
        run.seed for run in runs if run.arm == comparison.candidate
    }
    if comparison.paired and both - used:
        notes.append(f"{_listed(tuple(sorted(both - used)))} beyond the last look taken, and not used")
    if no_curves:
        notes.append(f"only the ends were compared: {no_curves}")
    unchecked = [gate.name for gate in comparison.gates if gate.passed is None]
    if unchecked and comparison.verdict != "PASS":  # a PASS has it among its flags
        notes.append(f"not checked: {', '.join(unchecked)}")
    return tuple(notes)


def describe_scale(terms: Terms) -> str:
    """How two values are compared, in words."""
    if terms.scale == "difference":
        return f"differences are of {terms.metric} itself, in its own unit"
    if terms.scale == "log-error":
        return f"differences are relative, of the error 1 - {terms.metric}"
    return f"differences are relative, of {terms.metric} itself"


def _near_one(pairs: Sequence[Pair], terms: Terms) -> list[str]:
    """What the margin is of the errors that are left, where the metric is near 1."""
    mean = sum(pair.reference.metric for pair in pairs) / len(pairs)
    if not NEAR_ONE <= mean < 1:
        return []
    share = terms.margins[0] * mean / (1 - mean)
    return [
        f"the reference's {terms.metric} is {mean:.4g}: the first margin is {100 * share:.0f} % of the errors that are "
        "left; scale 'log-error' compares those"
    ]


def _listed(seeds: tuple[int, ...]) -> str:
    names = ", ".join(str(seed) for seed in seeds)
    return f"seed {names} is" if len(seeds) == 1 else f"seeds {names} are"
