"""`validate`: a target under FP32 and under candidates, over paired seeds, with verdict, speed, memory and layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from floatline.errors import ComparisonError
from floatline.plans import Plan
from floatline.training.settings import name_folder
from floatline.validation.costs.measure import Bench, Costs
from floatline.validation.costs.worth import Wanted
from floatline.validation.result import Validation
from floatline.validation.running.processes import ProcessRunner, Runner
from floatline.validation.study.arms import AnyCandidate, Curve, plans_of, reference_plan
from floatline.validation.study.limits import Limits
from floatline.validation.study.preparation import Subject, reproduce
from floatline.validation.study.store import Store
from floatline.validation.study.study import Silence, Study, Watcher
from floatline.validation.verdict.comparison import Comparison, rank
from floatline.validation.verdict.pairs import NUDGED, REFERENCE, settle_direction
from floatline.validation.verdict.terms import LOOKS, MARGINS, Scale, Terms, looks_between


def validate(
    target: str | Callable[..., Any],
    plans: str | Plan | Sequence[AnyCandidate] = ("fp16-mixed",),
    *,
    steps: int | None = None,
    epochs: int | None = None,
    batches: int | None = None,
    margins: tuple[float, float] = MARGINS,
    scale: Scale = "log",
    higher_is_better: bool | None = None,
    language_model: bool = False,
    horizon: int | None = None,
    min_seeds: int = LOOKS[0],
    max_seeds: int = LOOKS[-1],
    rare: float | None = None,
    resolution: float | None = None,
    seed: int = 0,
    curve: Curve | None = None,
    broken: bool = True,
    measure: bool = True,
    faster: float | None = None,
    smaller: float | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    jobs: int | None = None,
    timeout: float | None = None,
    runner: Runner | None = None,
    watcher: Watcher | None = None,
) -> Validation:
    """Whether a target trains as well under each plan as in FP32, and what that saves.

    For every seed the arms have the same start, data order and evaluation: FP32; FP32 nudged by 1e-7, which shows the
    noise floor; each candidate; and, up to the first look, a candidate that is broken on purpose. FP32 clips and
    accumulates as the candidates do, so that only the precision differs. The plan 'fp32' as a candidate is judged by
    its nudged run: two equal runs would be bit-identical, and are refused.

    Args:
        target: FILE.py, package.module, package.module:name; or a function that builds a workload from a seed, whose
            arms run in this process, one at a time.
        plans: The candidates: names, YAML files, Plans, or pairs (name, function) of a function that trains with a
            seed and gives an ArmRun.
        steps: Steps of every arm. None: one pass over the batches or 200 steps, whichever is longer.
        epochs: Passes over the batches, instead of steps.
        batches: Use only so many of the target's batches.
        margins: Up to the first one worse is a PASS, from the second on a FAIL.
        scale: How two values of the metric are compared; see `Terms`.
        higher_is_better: Whether the metric is such as an accuracy. None: as the workload says; where it does not,
            no, and asked for where its name reads so.
        language_model: The metric is a language model's loss: the notes then say what 1 % of it is worth.
        horizon: Steps of the real training, where it is longer than the tested one.
        min_seeds: The fewest seeds, where the first look is taken.
        max_seeds: The most seeds; the looks are at 3, 5, 8, 12 and 20 of them.
        rare: The share of failing seeds that a PASS must rule out, which takes more seeds; None asks for none.
        resolution: The step in which the metric moves, such as 1 / items; None reads it from the values.
        seed: The first seed.
        curve: What the arms are compared by on the way. None: the metric, where taking it costs less than half of the
            training, or else the training loss.
        broken: Whether to train the broken arm.
        measure: Whether to measure speed, memory and layers.
        faster: How many times as fast a PASS must be, at the slow end of what was measured; None asks for nothing.
        smaller: The share of FP32's peak memory that a PASS may need; None asks for nothing.
        folder: Where the study is kept. None: floatline-runs/validate/NAME.
        resume: Go on with the study in the folder.
        jobs: Processes side by side. None: one for each GPU, or for every two cores.
        timeout: Seconds that one arm of one seed may take.
        runner: Runs the jobs elsewhere, such as on a cluster; `jobs` and `timeout` are then its own matter.
        watcher: Hears of what happens.

    Raises:
        FloatlineError: Wrong use: a target, plan, setting or folder that no study can be made with.
    """
    began, watcher, wanted = time.monotonic(), watcher or Silence(), Wanted(faster, smaller)
    candidates = plans_of([plans] if isinstance(plans, str | Plan) else plans)
    terms = Terms(
        higher_is_better=bool(higher_is_better),
        scale=scale,
        margins=margins,
        looks=looks_between(min_seeds, max_seeds, rare),
        resolution=resolution,
        rare=rare,
        horizon=horizon,
        language_model=language_model,
    )
    subject = Subject.of(target, candidates, reference_plan(candidates), Limits(steps, epochs, batches), seed=seed)
    if curve not in (None, "metric", "loss"):
        raise ComparisonError(f"The curve is {curve!r}. Take 'metric' or 'loss'.")
    asked = {**subject.asked, "terms": terms.as_json(), "broken": broken}
    asked |= {} if curve is None else {"curve": curve}
    place = Path("floatline-runs/validate") / name_folder(subject.text) if folder is None else folder
    with Store(place, asked=asked, resume=resume) as store:
        found = store.found or subject.inspect(curve)
        store.settle(found)
        said = found.get("higher_is_better") if higher_is_better is None else higher_is_better
        terms = replace(terms, metric=found["metric"], higher_is_better=settle_direction(found["metric"], said))
        arms = subject.make_arms(found, broken=broken)
        runner = runner or ProcessRunner(jobs=jobs, timeout=timeout)
        seeds = range(seed, seed + terms.looks[-1])
        study = Study(arms, [*map(arm_of, candidates)], terms, seeds, runner, store, watcher)
        comparisons = study.run()
        # Of what is refused nothing can be concluded, and what is a function has no plan to measure.
        worth = {comparison.candidate for comparison in comparisons if measure and comparison.verdict != "REFUSED"}
        plans_worth = {arm.name: arm.plan for arm in arms if arm.name in worth - {NUDGED} and arm.plan}
        costs = Costs()
        if plans_worth:
            costs = Bench(subject, found["steps"], shelf=store, tell=watcher.measuring).measure(plans_worth)
        validation = Validation(
            target=subject.text,
            comparisons=_ranked(comparisons, costs, wanted),
            runs=study.runs,
            speed=tuple(costs.speed),
            memory=tuple(costs.memory),
            layers=costs.layers,
            reasons=costs.reasons,
            plans={arm.name: arm.plan for arm in arms if arm.plan},
            environment=found["environment"],
            reproduce=reproduce(subject, terms, curve, wanted.words),
            seconds=time.monotonic() - began,
            folder=str(store.folder),
        )
        store.write("validation.json", validation.as_json())
        return validation


def arm_of(candidate: Plan | tuple[str, Any]) -> str:
    """Name of the arm that stands for a candidate: FP32's own is the nudged one, which is not bit-identical."""
    name = candidate.name if isinstance(candidate, Plan) else candidate[0]
    return NUDGED if name == REFERENCE else name


def _ranked(comparisons: Sequence[Comparison], costs: Costs, wanted: Wanted) -> tuple[Comparison, ...]:
    timings = {speed.arm: speed.timing for speed in costs.speed}
    times = {name: timing.ratio for name, timing in timings.items()}
    peaks = {memory.arm: memory.peak for memory in costs.memory}
    whole = peaks.get(REFERENCE)
    ratios = {name: peak / whole for name, peak in peaks.items()} if whole else {}
    weighed = [wanted.weigh(comparison, timings, ratios) for comparison in comparisons]
    return rank(weighed, time_ratios=times, memory_ratios=ratios)
