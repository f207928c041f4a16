"""Finished runs, found on the disk and compared: by seed where both sides share seeds, else by the wider interval."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from floatline.base.files import read_bounded
from floatline.errors import ComparisonError
from floatline.ledger.history import read_history
from floatline.ledger.parts import list_parts
from floatline.plans.yaml_files import parse_yaml
from floatline.validation.metrics.metric_files import choose_recorded, list_files, read_all
from floatline.validation.metrics.recorded import Recorded
from floatline.validation.metrics.wandb_api import PREFIX, fetch_runs
from floatline.validation.study.commands import as_run
from floatline.validation.study.study import refuse_equal_seeds
from floatline.validation.verdict.comparison import Comparison
from floatline.validation.verdict.pairs import BROKEN, NUDGED, NUM_FIRST_LOSSES, REFERENCE, ArmRun, settle_direction
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
    resolution: float | None = None,
) -> Comparison:
    """The verdict on runs that are done.

    Each side is a run or a folder of runs: of a floatline study or one of its arms, run folders with a ledger, or
    folders and files with metrics as training scripts write them.

    Numerics:
        One look at all runs there are, at alpha 5 %: how many there are must not have been chosen by comparing again
        and again. The runs of one floatline study are compared with that study's own looks instead.
        Pairs by seed where each side's seeds are known, none is there twice, and three or more are on both sides;
        else the wider interval of independent runs. Checked by tests/validation/test_finished.py.

    Args:
        baseline: The runs in FP32.
        candidate: The runs in the other precision.
        metric: Which metric; None for the metric of a study, or the training loss of ledgers.
        higher_is_better: None: lower, unless the study or the name of the metric says otherwise.
        margins: Up to the first one worse passes, from the second one on fails; None is 1 % and 2 %.
        scale: 'log', 'log-error' or 'difference', as in `Terms`; None is that of the study, or 'log'.
        resolution: The step in which the metric moves, such as 1 / items; None reads it from the values.

    Raises:
        ComparisonError: A side has no runs, the metric is not there, or a setting cannot be used.
    """
    names = str(baseline), str(candidate)
    places = tuple(fetch_runs(name) if name.startswith(PREFIX) else Path(name) for name in names)
    if names[0] == names[1] and not (places[0] / "study.json").is_file():
        raise ComparisonError(f"Both sides are '{names[0]}'. Give two different runs, or folders of runs.")
    if names[0] == names[1]:
        names = f"{names[0]} (fp32)", f"{names[1]} (candidate)"
    ours = find_runs(places[0], arm=names[0], metric=metric, candidate=False)
    theirs = find_runs(places[1], arm=names[1], metric=metric, candidate=True)
    runs = (*ours.runs, *theirs.runs)
    paired = _can_pair(ours, theirs)
    terms = _terms(ours, theirs, metric, higher_is_better, margins, scale, resolution, paired=paired)
    if not paired:
        result = decide_unpaired(runs, candidate=names[1], terms=terms, reference=names[0])
        means = _mean(ours.runs), _mean(theirs.runs)
        return dataclasses.replace(result, notes=(_why_unpaired(ours, theirs), *result.notes), means=means)
    if ours.study is not None and ours.study == theirs.study:
        runs = (*runs, *find_controls(ours.study))
    result = decide(runs, candidate=names[1], terms=terms, reference=names[0])
    result = refuse_equal_seeds(result, runs)
    counted = [[run for run in side.runs if run.seed in result.seeds] for side in (ours, theirs)]
    result = dataclasses.replace(result, means=(_mean(counted[0]), _mean(counted[1])))
    if len(terms.looks) > 1:
        return result
    once = "one look at all seeds: runs that are added until it passes make a PASS mean less; validate corrects for it"
    return dataclasses.replace(result, notes=(*result.notes, once))


def _mean(runs: Sequence[ArmRun]) -> float:
    """Mean metric; NaN where a run has none."""
    return sum(run.metric for run in runs) / len(runs) if runs else math.nan


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
    resolution: float | None,
    *,
    paired: bool,
) -> Terms:
    """What is asked: the study's terms where both sides are of one study, changed by what was said."""
    study = _study_terms(ours.study) if ours.study is not None and ours.study == theirs.study else None
    if study is not None:
        changed: dict[str, Any] = {"margins": margins, "scale": scale, "higher_is_better": higher_is_better}
        changed["resolution"] = resolution
        return dataclasses.replace(study, **{name: value for name, value in changed.items() if value is not None})
    name = metric or "loss"
    return Terms(
        metric=name,
        higher_is_better=settle_direction(name, higher_is_better),
        scale=scale or "log",
        margins=margins or MARGINS,
        looks=(max(LOOKS[0], len(_shared(ours, theirs))),) if paired else LOOKS,
        resolution=resolution,
    )


def _study_terms(study: Path) -> Terms | None:
    """The terms that a study was finished with; None where it has no verdict yet."""
    try:
        data: object = json.loads(read_bounded(study / "validation.json", most=256 << 20))
        return Terms.from_json(cast("Any", data)["comparisons"][0]["terms"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


SETTINGS_FILES = ("config.json", "config.yaml", "hparams.yaml", "args.json", "params.json", ".hydra/config.yaml")
LARGEST_SETTINGS = 1 << 20
NUM_POINTS = 12  # of a ledger's curve
SEED_IN_NAME = re.compile(r"seed[_=-]?(\d{1,9})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True)
class Found:
    """The runs of one side.

    Args:
        runs: One for each run, all of one arm. The seed counts where `seeded` says so.
        seeded: Whether the seed of every run is known, and no two have the same.
        study: The folder of the floatline study that they belong to; None where they belong to none.
    """

    runs: tuple[ArmRun, ...]
    seeded: bool
    study: Path | None = None


def find_runs(place: Path, *, arm: str, metric: str | None, candidate: bool) -> Found:
    """Every run of a folder or file.

    Args:
        place: A study's folder or the folder of one of its arms, a run folder with a ledger, a folder or file with
            metrics, or a folder of such folders.
        arm: What the runs are called from now on.
        metric: What is read from metric files; floatline's own runs know theirs.
        candidate: Which arm of a whole study is meant: its one candidate, or FP32.

    Raises:
        ComparisonError: There is no run, the metric is not in it, or it is not clear what is one run.
    """
    if not place.exists():
        raise ComparisonError(f"'{place}' is not there. Give a run, or a folder of runs.")
    own = _floatline_arm(place, candidate=candidate)
    if own is not None:
        runs = [ArmRun.from_json(_read_json(path)) for path in sorted(own.glob("*.json"), key=_number)]
        return _named(runs, arm, seeded=True, study=own.parent.parent)
    ledgers = _ledger_folders(place)
    if ledgers and (metric in (None, "loss") or not _records(place, metric)):
        _check_ledger_metric(metric, place)
        pairs = [(_ledger_run(folder), _seed_of([], folder, place)) for folder in ledgers]
        return _with_seeds(pairs, arm)
    if metric is None:
        raise ComparisonError(f"'{place}' holds files of metrics. Say which one to compare: --metric val/loss.")
    pairs = list[tuple[ArmRun, int | None]]()
    for folder, group in _group(_read(place), metric, place):
        recorded = choose_recorded(group, metric, where=f"'{folder}'")
        pairs.append((as_run(recorded, metric, arm=arm, seed=0), _seed_of(group, folder, place)))
    return _with_seeds(pairs, arm)


def find_controls(study: Path) -> tuple[ArmRun, ...]:
    """The nudged and the broken arm of a study, which tell how far a comparison can be trusted."""
    folders = [study / "runs" / name for name in (NUDGED, BROKEN)]
    return tuple(ArmRun.from_json(_read_json(path)) for folder in folders for path in sorted(folder.glob("*.json")))


def _floatline_arm(place: Path, *, candidate: bool) -> Path | None:
    """The folder with the runs of one arm of a study; None where the place is no study's."""
    if place.parent.name == "runs" and (place.parent.parent / "study.json").is_file():
        return place
    if not (place / "study.json").is_file():
        return None
    arms = sorted(path for path in (place / "runs").glob("*") if path.is_dir())
    if not candidate:
        wanted = [path for path in arms if path.name == REFERENCE]
    else:
        wanted = [path for path in arms if path.name not in (REFERENCE, NUDGED, BROKEN)]
    if len(wanted) == 1:
        return wanted[0]
    names = ", ".join(str(path) for path in (wanted or arms)) or "none"
    raise ComparisonError(f"Study '{place}' has {len(wanted)} such arms. Name the folder of one: {names}.")


def _named(runs: Sequence[ArmRun], arm: str, *, seeded: bool, study: Path | None = None) -> Found:
    if not runs:
        raise ComparisonError(f"There is no run in '{arm}'. Give a run, or a folder of runs.")
    return Found(tuple(dataclasses.replace(run, arm=arm) for run in runs), seeded, study)


def _with_seeds(pairs: Sequence[tuple[ArmRun, int | None]], arm: str) -> Found:
    seeds = [seed for _, seed in pairs]
    seeded = None not in seeds and len(set(seeds)) == len(seeds)
    runs = [
        dataclasses.replace(run, seed=seed if seeded and seed is not None else place)
        for place, (run, seed) in enumerate(pairs)
    ]
    return _named(sorted(runs, key=lambda run: run.seed), arm, seeded=seeded)


def _ledger_folders(place: Path) -> list[Path]:
    """The folder itself where it holds a ledger, else those folders right below it that do."""
    if not place.is_dir():
        return []
    if list_parts(place):
        return [place]
    return sorted(path for path in place.iterdir() if path.is_dir() and list_parts(path))


def _records(place: Path, metric: str) -> bool:
    """Whether a file of metrics has this one: a script's own, beside the folder of its ledger."""
    return any(run.spelling(metric) is not None for run in read_all(sorted(list_files(place)), strict=False)[0])


def _check_ledger_metric(metric: str | None, place: Path) -> None:
    if metric not in (None, "loss"):
        raise ComparisonError(
            f"'{place}' holds a ledger, which has no metric '{metric}'. Compare its training loss: --metric loss."
        )


def _ledger_run(folder: Path) -> ArmRun:
    """A run folder: its training loss, averaged over twelfths of the steps; the last one is the result.

    Numerics:
        A mean over a twelfth is NaN where one of its losses is: no loss is left out. A run that was stopped, or that
        did not come to its end in order, is diverged or has an error.
    """
    history = read_history(folder)
    losses = [math.nan if loss is None else loss for loss in history.loss]
    if not losses:
        raise ComparisonError(f"The ledger in '{folder}' has no steps. Train it first.")
    ends = sorted({math.ceil(len(losses) * part / NUM_POINTS) for part in range(1, NUM_POINTS + 1)})
    starts = [0, *ends[:-1]]
    curve = tuple(
        (end, sum(losses[start:end]) / (end - start)) for start, end in zip(starts, ends, strict=True)
    )  # a sum with a NaN in it is NaN
    account = history.accounts.run
    stopped = any(event.event == "stop" for event in history.events)
    return ArmRun(
        arm="ledger",
        seed=0,
        metric=curve[-1][1],
        diverged=stopped,
        curve=curve,
        curve_of="loss",
        first_losses=tuple(losses[:NUM_FIRST_LOSSES]) if history.attempt[0] == 1 else (),
        steps=account.attempted,
        applied=account.applied,
        skipped=account.num_skipped,
        error="" if history.ended or stopped else "its ledger was not closed, so that it did not come to its end",
    )


def _read(place: Path) -> list[Recorded]:
    paths = [place] if place.is_file() else sorted(list_files(place))
    runs, problems = read_all(paths, strict=place.is_file())
    if not runs:
        also = f" {problems[0]}" if problems else ""
        raise ComparisonError(f"There is no file with metrics in '{place}'.{also} Give a run, or a folder of runs.")
    return runs


def _group(runs: list[Recorded], metric: str, place: Path) -> list[tuple[Path, list[Recorded]]]:
    """What belongs to one run, by where it lies: right below the deepest folder that holds everything."""
    having = [run for run in runs if run.spelling(metric) is not None]
    if not having:
        choose_recorded(runs, metric, where=f"'{place}'")  # says what is there instead
    if len({run.path for run in having}) == 1:
        return [(run.path, [run]) for run in having]  # one file; a database may hold several runs
    common = Path(os.path.commonpath([run.path.parent for run in having]))
    direct = [run for run in having if run.path.parent == common]
    if not direct:
        groups: dict[Path, list[Recorded]] = {}
        for run in having:
            groups.setdefault(common / run.path.relative_to(common).parts[0], []).append(run)
        return list(groups.items())
    if len(direct) == len(having) and all(SEED_IN_NAME.search(run.path.name) for run in direct):
        return [(run.path, [run]) for run in direct]  # seed_0.jsonl, seed_1.jsonl
    return [(common, having)]


def _seed_of(group: Sequence[Recorded], folder: Path, place: Path) -> int | None:
    """From the settings in the metric files, a settings file beside them, or the name of file or folder."""
    for recorded in group:
        seed = _as_seed(recorded.settings.get("seed"))
        if seed is not None:
            return seed
    inside = folder if folder.is_dir() else folder.parent
    # A settings file beside several runs says nothing about any of them.
    if inside != place or folder.is_dir():
        for name in SETTINGS_FILES:
            seed = _seed_in(inside / name)
            if seed is not None:
                return seed
    below = folder.relative_to(place.parent) if folder.is_relative_to(place.parent) else folder
    matches = SEED_IN_NAME.findall(str(below))
    return int(matches[-1]) if matches else None


def _seed_in(path: Path) -> int | None:
    try:
        data = parse_yaml(read_bounded(path, most=LARGEST_SETTINGS).decode("utf-8"))  # JSON is YAML as well
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(data, dict):
        return None
    fields = cast("dict[Any, Any]", data)
    return _as_seed(fields.get("seed"))


def _as_seed(value: Any) -> int | None:
    if isinstance(value, dict):
        value = cast("dict[Any, Any]", value).get("value")  # as W&B's config.yaml has it
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value.strip()):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_bounded(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ComparisonError(f"'{path}' cannot be read: {error}. Delete it, and resume the study.") from None


def _number(path: Path) -> tuple[int, str]:
    return (int(path.stem), "") if path.stem.isdecimal() else (1 << 62, path.stem)
