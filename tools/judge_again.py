"""Judges the kept studies of the five systems again, from their runs, by the rules of this version.

    python tools/judge_again.py [--measure FOLDER] [docs/workloads/NAME_validation.json ...]

Each file is rewritten with its page and its text beside it; nothing is trained. What changed is printed.
With --measure, speed and memory of the candidates are measured here as well, on the machine of the runs; what was
measured is kept in the folder and not measured again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from floatline.plans import Plan
from floatline.report.validation.report import write_report
from floatline.validation.costs.measure import Bench
from floatline.validation.result import Validation
from floatline.validation.study.arms import reference_plan
from floatline.validation.study.limits import Limits
from floatline.validation.study.preparation import Subject
from floatline.validation.study.store import Store
from floatline.validation.study.study import refuse_equal_seeds
from floatline.validation.verdict.comparison import rank
from floatline.validation.verdict.verdict import decide

ROOT = Path(__file__).parent.parent


def judge_again(validation: Validation) -> Validation:
    """The same runs and terms, judged again; unpaired comparisons stay as they are."""
    judged = [
        refuse_equal_seeds(
            decide(validation.runs, candidate=c.candidate, terms=c.terms, reference=c.reference, plan=c.plan),
            validation.runs,
        )
        if c.paired
        else c
        for c in validation.comparisons
    ]
    return replace(validation, comparisons=rank(judged))


def measure(validation: Validation, folder: Path) -> Validation:
    """The same runs with the speed and memory of their candidates, as measured on this machine and kept in a folder."""
    plans = {c.candidate: validation.plans[c.candidate] for c in validation.comparisons}
    candidates = [Plan.model_validate(plan) for plan in plans.values()]
    steps = max(run.steps for run in validation.runs)
    seed = min(run.seed for run in validation.runs)
    subject = Subject.of(validation.target, candidates, reference_plan(candidates), Limits(steps), seed=seed)
    with Store(folder, asked={}, resume=(folder / "study.json").exists()) as store:
        costs = Bench(subject, steps, shelf=store, tell=print).measure(plans)
    taken = {"speed": tuple(costs.speed), "memory": tuple(costs.memory), "layers": costs.layers}
    return replace(validation, **taken, reasons=costs.reasons)


def main(arguments: list[str]) -> None:
    """Judge each study again."""
    folder = Path(arguments[1]) if arguments[:1] == ["--measure"] else None
    paths = [Path(name) for name in arguments[2 if folder else 0 :]]
    for path in paths or sorted((ROOT / "docs/workloads").glob("*_validation*.json")):
        before = Validation.from_json(json.loads(path.read_text(encoding="utf-8"))["validation"])
        after = judge_again(measure(before, folder / path.stem) if folder else before)
        print(f"{path.name}: {before.verdict} -> {after.verdict}, {after.best.reason}")
        with tempfile.TemporaryDirectory() as made:
            page = write_report(after, Path(made))
            for ending in (".json", ".md", ".html"):
                text = page.with_suffix(ending).read_text(encoding="utf-8")
                # The command is for a GPU or takes long: the tests of pages are not to run it.
                path.with_suffix(ending).write_text(text.replace("```console", "```text"), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
