"""Finished runs compared: paired by seed where both sides have the same seeds, else with the wider interval."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, cast

from floatline.base.files import read_bounded
from floatline.errors import ComparisonError
from floatline.validation.finished.found_runs import Found, find_controls, find_runs
from floatline.validation.study.study import refuse_equal_seeds
from floatline.validation.verdict.comparison import Comparison
from floatline.validation.verdict.pairs import settle_direction
from floatline.validation.verdict.terms import LOOKS, MARGINS, Scale, Terms
from floatline.validation.verdict.unpaired import decide_unpaired
from floatline.validation.verdict.verdict import decide

AnyPlace = str | os.PathLike[str]


def compare(
    baseline: AnyPlace,
    candidate: AnyPlace,
    *,
    metric: str | None = None,
    higher_is_better: bool | None = None,
    margins: tuple[float, float] | None = None,
    scale: Scale | None = None,
) -> Comparison:
    """The verdict on runs that are done.

    Each side is a run or a folder of runs: of a floatline study or one of its arms, run folders with a ledger, or
    folders and files with metrics as training scripts write them.

    Numerics:
        One look at all runs there are, at alpha 5 %: how many there are must not have been chosen by comparing again
        and again. The runs of one floatline study are compared with that study's own looks instead.
        Pairs by seed where each side's seeds are known, none is there twice, and three or more are on both sides;
        else Welch's interval of independent runs. Checked by tests/validation/finished/test_finished.py.

    Args:
        baseline: The runs in FP32.
        candidate: The runs in the other precision.
        metric: Which metric; None for the metric of a study, or the training loss of ledgers.
        higher_is_better: None: lower, unless the study or the name of the metric says otherwise.
        margins: Up to the first one worse passes, from the second one on fails; None is 1 % and 2 %.
        scale: 'log', 'log-error' or 'difference', as in `Terms`; None is that of the study, or 'log'.

    Raises:
        ComparisonError: A side has no runs, the metric is not there, or a setting cannot be used.
    """
    places = Path(baseline), Path(candidate)
    names = str(baseline), str(candidate)
    if names[0] == names[1] and not (places[0] / "study.json").is_file():
        raise ComparisonError(f"Both sides are '{names[0]}'. Give two different runs, or folders of runs.")
    if names[0] == names[1]:
        names = f"{names[0]} (fp32)", f"{names[1]} (candidate)"
    ours = find_runs(places[0], arm=names[0], metric=metric, candidate=False)
    theirs = find_runs(places[1], arm=names[1], metric=metric, candidate=True)
    runs = (*ours.runs, *theirs.runs)
    paired = _can_pair(ours, theirs)
    terms = _terms(ours, theirs, metric, higher_is_better, margins, scale, paired=paired)
    if not paired:
        result = decide_unpaired(runs, candidate=names[1], terms=terms, reference=names[0])
        return dataclasses.replace(result, notes=(_why_unpaired(ours, theirs), *result.notes))
    if ours.study is not None and ours.study == theirs.study:
        runs = (*runs, *find_controls(ours.study))
    result = decide(runs, candidate=names[1], terms=terms, reference=names[0])
    result = refuse_equal_seeds(result, runs)
    if len(terms.looks) > 1:
        return result
    once = "one look at all seeds: runs that are added until it passes make a PASS mean less; validate corrects for it"
    return dataclasses.replace(result, notes=(*result.notes, once))


def _shared(ours: Found, theirs: Found) -> set[int]:
    return {run.seed for run in ours.runs} & {run.seed for run in theirs.runs}


def _can_pair(ours: Found, theirs: Found) -> bool:
    if not ours.seeded or not theirs.seeded:
        return False
    enough = min(len(ours.runs), len(theirs.runs)) >= LOOKS[0]
    shared = len(_shared(ours, theirs))
    # Where neither way is enough, the pairs that there are say better what is missing.
    return shared >= LOOKS[0] or (shared > 0 and not enough)


def _why_unpaired(ours: Found, theirs: Found) -> str:
    for found in (ours, theirs):
        if not found.seeded:
            return (
                f"the seeds in '{found.runs[0].arm}' are not known, or are there twice: name folders seed_0, seed_1 …"
            )
    return f"only {len(_shared(ours, theirs))} seeds are on both sides"


def _terms(
    ours: Found,
    theirs: Found,
    metric: str | None,
    higher_is_better: bool | None,
    margins: tuple[float, float] | None,
    scale: Scale | None,
    *,
    paired: bool,
) -> Terms:
    """What is asked: the study's terms where both sides are of one study, changed by what was said."""
    study = _study_terms(ours.study) if ours.study is not None and ours.study == theirs.study else None
    if study is not None:
        changed: dict[str, Any] = {"margins": margins, "scale": scale, "higher_is_better": higher_is_better}
        return dataclasses.replace(study, **{name: value for name, value in changed.items() if value is not None})
    name = metric or "loss"
    return Terms(
        metric=name,
        higher_is_better=settle_direction(name, higher_is_better),
        scale=scale or "log",
        margins=margins or MARGINS,
        looks=(max(LOOKS[0], len(_shared(ours, theirs))),) if paired else LOOKS,
    )


def _study_terms(study: Path) -> Terms | None:
    """The terms that a study was finished with; None where it has no verdict yet."""
    try:
        data: object = json.loads(read_bounded(study / "validation.json", most=256 << 20))
        return Terms.from_json(cast("Any", data)["comparisons"][0]["terms"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
