"""`validate_commands`: training scripts as arms, over paired seeds, with the same verdict as a target's."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from floatline.base.files import find_root
from floatline.training.settings import name_folder
from floatline.validation.result import Validation
from floatline.validation.running.environment import describe_environment
from floatline.validation.running.processes import ProcessRunner, Runner
from floatline.validation.study.code_files import command_code
from floatline.validation.study.commands import CommandArm, command_arms
from floatline.validation.study.store import Store
from floatline.validation.study.study import Silence, Study, Watcher
from floatline.validation.verdict.comparison import rank
from floatline.validation.verdict.pairs import settle_direction
from floatline.validation.verdict.terms import LOOKS, MARGINS, Scale, Terms, looks_between, words_of


def validate_commands(
    baseline: str,
    candidates: Sequence[str],
    *,
    metric: str,
    higher_is_better: bool | None = None,
    metric_file: str | None = None,
    cwd: str | Path | None = None,
    margins: tuple[float, float] = MARGINS,
    scale: Scale = "log",
    language_model: bool = False,
    horizon: int | None = None,
    min_seeds: int = LOOKS[0],
    max_seeds: int = LOOKS[-1],
    rare: float | None = None,
    resolution: float | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = False,
    jobs: int | None = None,
    timeout: float | None = None,
    runner: Runner | None = None,
    watcher: Watcher | None = None,
) -> Validation:
    """Whether a script trains as well in each candidate's precision as in the baseline's.

    The commands are run as they are, without a shell, with `{seed}` and `{folder}` filled in. What only a target can
    give is not there: no nudged and no broken arm, no value before training, no speed, memory or layers. The notes of
    the verdict say which gates were not checked.

    Args:
        baseline: The command that trains in FP32.
        candidates: A command for each candidate.
        metric: Name of the metric, as the script writes it.
        higher_is_better: None: lower, unless the name reads otherwise, which is then asked for.
        metric_file: Pattern of the files that hold the metric; None: whatever a run writes, or its output.
        cwd: Where the commands run; None is the current folder.
        margins: Up to the first one worse is a PASS, from the second on a FAIL.
        scale: How two values of the metric are compared; see `Terms`.
        language_model: The metric is a language model's loss: the notes then say what 1 % of it is worth.
        horizon: Steps of the real training, where it is longer than the tested one.
        min_seeds: The fewest seeds, where the first look is taken.
        max_seeds: The most seeds; the looks are at 3, 5, 8, 12 and 20 of them.
        rare: The share of failing seeds that a PASS must rule out, which takes more seeds; None asks for none.
        resolution: The step in which the metric moves, such as 1 / items; None reads it from the values.
        seed: The first seed.
        folder: Where the study is kept. None: floatline-runs/validate/NAME.
        resume: Go on with the study in the folder.
        jobs: Processes side by side, for commands that have `{folder}`; others run one at a time.
        timeout: Seconds that one run may take, where it has `{folder}`.
        runner: Runs the jobs elsewhere.
        watcher: Hears of what happens.

    Raises:
        ComparisonError: A command, setting or folder that no study can be made with.
    """
    began, watcher = time.monotonic(), watcher or Silence()
    terms = Terms(
        metric=metric,
        higher_is_better=settle_direction(metric, higher_is_better),
        scale=scale,
        margins=margins,
        looks=looks_between(min_seeds, max_seeds, rare),
        resolution=resolution,
        rare=rare,
        horizon=horizon,
        language_model=language_model,
    )
    place = Path("floatline-runs/validate") / _name(candidates) if folder is None else Path(folder)
    work = Path.cwd() if cwd is None else Path(cwd)
    arms = command_arms(baseline, candidates, metric=metric, folder=place, cwd=work, metric_file=metric_file)
    asked = {
        "commands": {arm.name: arm.command for arm in arms},
        "code": {arm.name: command_code(arm.command, work, find_root()) for arm in arms},
        "cwd": str(work.absolute()),
        "metric_file": metric_file,
        "terms": terms.as_json(),
        "seed": seed,
    }
    with Store(place, asked=asked, resume=resume) as store:
        found = store.found or {"environment": describe_environment("")}
        store.settle(found)
        study = Study(
            arms,
            [arm.name for arm in arms[1:]],
            terms,
            range(seed, seed + terms.looks[-1]),
            runner or ProcessRunner(jobs=jobs, timeout=timeout),
            store,
            watcher,
        )
        ranked = rank(study.run())
        commands = {arm.name: arm.command for arm in arms}
        validation = Validation(
            target=commands[ranked[0].candidate],
            comparisons=ranked,
            runs=study.runs,
            plans={arm.name: arm.plan for arm in arms},
            environment=found["environment"],
            reproduce=_reproduce(arms, terms, seed, cwd),
            seconds=time.monotonic() - began,
            folder=str(store.folder),
        )
        store.write("validation.json", validation.as_json())
        return validation


def _name(candidates: Sequence[str]) -> str:
    """After the script that is run: 'python train.py …' is 'train'."""
    words = shlex.split(candidates[0]) if candidates else []
    return name_folder(next((word for word in words if word.endswith(".py")), "commands"))


def _reproduce(arms: Sequence[CommandArm], terms: Terms, seed: int, cwd: str | Path | None) -> str:
    words = ["floatline", "validate", "--baseline", arms[0].command]
    for arm in arms[1:]:
        words += ["--candidate", arm.command]
    words += ["--metric", terms.metric, "--higher-is-better" if terms.higher_is_better else "--lower-is-better"]
    words += ["--metric-file", arms[0].metric_file] if arms[0].metric_file is not None else []
    words += ["--cwd", str(cwd)] if cwd is not None else []
    return shlex.join([*words, *words_of(terms), "--seed", str(seed)])
