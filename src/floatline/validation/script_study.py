"""`validate_script`: one script under several plans, over paired seeds, with the same verdict as a target's."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from floatline.base.files import find_root
from floatline.errors import ComparisonError
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.running.command import parse_command
from floatline.training.settings import name_folder
from floatline.validation.result import Validation
from floatline.validation.running.environment import describe_environment
from floatline.validation.running.processes import ProcessRunner, Runner
from floatline.validation.study.code_files import command_code
from floatline.validation.study.script_arms import LOSS, ScriptArm, is_expression, run_script
from floatline.validation.study.store import Store
from floatline.validation.study.study import Silence, Study, Watcher
from floatline.validation.verdict.comparison import rank
from floatline.validation.verdict.pairs import REFERENCE, settle_direction
from floatline.validation.verdict.terms import LOOKS, MARGINS, Scale, Terms, looks_between, words_of

# Steps that tell whether a seed changes anything.
_FIRST_STEPS = 2


def validate_script(
    words: Sequence[str],
    plans: Sequence[Plan | str | None],
    *,
    metric: str = LOSS,
    higher_is_better: bool | None = None,
    margins: tuple[float, float] = MARGINS,
    scale: Scale = "log",
    language_model: bool = False,
    horizon: int | None = None,
    steps: int | None = None,
    min_seeds: int = LOOKS[0],
    max_seeds: int = LOOKS[-1],
    rare: float | None = None,
    resolution: float | None = None,
    seed: int = 0,
    shifts: bool = False,
    sources: dict[str, str] | None = None,
    device: str = "",
    folder: str | Path | None = None,
    resume: bool = False,
    jobs: int | None = None,
    timeout: float | None = None,
    runner: Runner | None = None,
    watcher: Watcher | None = None,
) -> Validation:
    """Whether a script trains as well under each plan as in FP32.

    Both arms are the same script, which is not edited: one in FP32, one under the plan. Python's, numpy's and torch's
    random numbers are seeded before its first line. What it writes is kept apart, in the study's folder.

    Args:
        words: The command: 'python', 'train.py' and so on, with `{seed}` where the script takes a seed.
        plans: A plan, or the name or file of one, for each candidate; None runs the script as it is.
        metric: 'loss' is the loss as the script's backward passes begin with it, a mean over the last tenth of the
            steps; an expression with a group finds values in what it prints, the last one counts; any other name is
            looked for in the files that it writes.
        higher_is_better: None: lower, unless the name reads otherwise, which is then asked for.
        margins: Up to the first one worse is a PASS, from the second on a FAIL.
        scale: How two values of the metric are compared; see `Terms`.
        language_model: The metric is a language model's loss: the notes then say what 1 % of it is worth.
        horizon: Steps of the real training, where it is longer than the tested one.
        steps: Steps after which the script is ended; None lets it run to its end.
        min_seeds: The fewest seeds, where the first look is taken.
        max_seeds: The most seeds; the looks are at 3, 5, 8, 12 and 20 of them.
        rare: The share of failing seeds that a PASS must rule out, which takes more seeds; None asks for none.
        resolution: The step in which the metric moves, such as 1 / items; None reads it from the values.
        seed: The first seed.
        shifts: Whether the script's own seeds are raised by the arm's, where the command has no `{seed}`.
        sources: Texts that the candidates import instead of files, by path.
        device: 'cuda' runs a script that is written for a GPU on the CPU, where there is none.
        folder: Where the study is kept. None: floatline-runs/validate/NAME.
        resume: Go on with the study in the folder.
        jobs: Processes side by side.
        timeout: Seconds that one run may take.
        runner: Runs the jobs elsewhere.
        watcher: Hears of what happens.

    Raises:
        TargetError: The command runs no Python code.
        ComparisonError: A setting or folder that no study can be made with, or a script whose seeds change nothing.
    """
    began, watcher = time.monotonic(), watcher or Silence()
    parse_command([word.replace("{seed}", str(seed)) for word in words])
    terms = Terms(
        metric=metric,
        higher_is_better=check_metric(metric, higher_is_better),
        scale=scale,
        margins=margins,
        looks=looks_between(min_seeds, max_seeds, rare),
        resolution=resolution,
        rare=rare,
        horizon=horizon,
        language_model=language_model,
    )
    text = shlex.join(words)
    place = Path("floatline-runs/validate") / name_script(words) if folder is None else Path(folder)
    shared: dict[str, Any] = {"folder": place, "metric": metric, "steps": steps, "device": device, "shifts": shifts}
    reference = ScriptArm(REFERENCE, tuple(words), resolve_plan("fp32"), **shared)
    candidates = [None if plan is None else resolve_plan(plan) for plan in plans]
    names = ["as-written" if plan is None else plan.name for plan in candidates]
    own: dict[str, Any] = {**shared, "sources": sources or {}}
    arms = [reference, *(ScriptArm(n, tuple(words), p, **own) for n, p in zip(names, candidates, strict=True))]
    _check_names([arm.name for arm in arms])
    asked = {
        "command": text,
        "code": command_code(text, Path.cwd(), find_root()),
        "plans": {arm.name: arm.plan for arm in arms},
        "steps": steps,
        "device": device,
        "shifts": shifts,
        "sources": sources or {},
        "terms": terms.as_json(),
        "seed": seed,
    }
    with Store(place, asked=asked, resume=resume) as store:
        found = store.found
        if not found:
            watcher.plan(f"looking at the script's first steps in FP32, with seeds {seed} and {seed + 1}")
            check_seeds(reference, seed)
            found = {"environment": describe_environment(device)}
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
        validation = Validation(
            target=text,
            comparisons=ranked,
            runs=study.runs,
            plans={arm.name: arm.plan for arm in arms},
            environment=found["environment"],
            reproduce=_reproduce(words, plans, terms, seed, steps),
            seconds=time.monotonic() - began,
            folder=str(store.folder),
        )
        store.write("validation.json", validation.as_json())
        return validation


def check_metric(metric: str, higher_is_better: bool | None) -> bool:
    """Whether higher values of a metric are better; says what is wrong with one that no study can be made by.

    Raises:
        ComparisonError: It is an expression without a group, or reads like one that is better when higher.
    """
    is_expression(metric)
    return settle_direction(metric, higher_is_better)


def check_seeds(arm: ScriptArm, seed: int) -> None:
    """Refuse a script whose first steps are the same with another seed.

    Raises:
        ComparisonError: They are, or the script does not come to its first step.
    """
    short = replace(arm, name="seeds", metric=LOSS, steps=_FIRST_STEPS)
    first = run_script(short.job(seed))
    if first.error:
        raise ComparisonError(f"The script fails in FP32: {first.error}")
    if not first.losses:
        raise ComparisonError(
            "No optimizer of the script made a step, so that nothing was trained. "
            "Check that it has batches and steps left to train, and that it trains with torch.optim."
        )
    if run_script(short.job(seed + 1)).losses != first.losses:
        return
    own = f" The script seeds itself: {Path(first.seeded[-1]).name}." if first.seeded else ""
    raise ComparisonError(
        f"The first steps are the same with seeds {seed} and {seed + 1}, so that all runs would be.{own} Put {{seed}} "
        "where the script takes its seed, such as -- python train.py --seed {seed}."
    )


def _check_names(names: Sequence[str]) -> None:
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ComparisonError(f"Two arms are called '{twice}'. Give each plan its own name, and not '{REFERENCE}'.")


def name_script(words: Sequence[str]) -> str:
    """A name for what a command's runs leave behind: 'python train.py …' is 'train'."""
    return name_folder(next((word for word in words if word.endswith(".py")), "script"))


def _reproduce(
    words: Sequence[str], plans: Sequence[Plan | str | None], terms: Terms, seed: int, steps: int | None
) -> str:
    given = ["floatline", "validate"]
    for plan in filter(None, plans):
        given += ["--plan", plan.name if isinstance(plan, Plan) else plan]
    given += [] if terms.metric == LOSS else ["--metric", terms.metric]
    given += ["--higher-is-better"] if terms.higher_is_better else []
    given += [] if steps is None else ["--steps", str(steps)]
    return f"{shlex.join([*given, *words_of(terms), '--seed', str(seed)])} -- {shlex.join(words)}"
