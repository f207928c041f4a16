"""Arms: what is trained side by side: plans, functions, and whatever else can say what one seed of it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from floatline.errors import ComparisonError
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.validation.running.jobs import Job
from floatline.validation.verdict.pairs import BROKEN, NUDGED, REFERENCE, ArmRun

Change = Literal["none", "nudged", "broken"]
Curve = Literal["metric", "loss"]
"""What is taken on the way."""
TRAIN = "floatline.validation.study.trained_arm:run_job"
CHANGES: dict[str, Change] = {NUDGED: "nudged", BROKEN: "broken"}


class Arm(Protocol):
    """Anything that can be trained once for each seed: a plan, a function, a command from outside.

    `job(seed)` says what one seed of it is. A study hands the jobs to a runner (`processes.Runner`), which calls
    `Job.run` in a process of its own for each, or here where the job has a `function`.
    """

    @property
    def name(self) -> str:
        """'fp32' for the reference, 'fp32-nudged', 'broken', or the name of a candidate."""
        ...

    @property
    def plan(self) -> dict[str, Any]:
        """Its plan as plain data, for the report; empty where it has none."""
        ...

    def job(self, seed: int) -> Job:
        """What one seed of it is."""
        ...


@dataclass(frozen=True)
class PlanArm:
    """A target trained under a plan.

    Args:
        name: Of the arm.
        target: As `workload.load_target` takes it.
        precision: The plan.
        steps: How long; 0 trains nothing.
        num_batches: How many of the target's batches are used; None is all.
        curve_of: What is recorded on the way: the metric, where evaluating it is cheap, or the training loss.
        workload: Builds the workload where there is no target that another process could load.
    """

    name: str
    target: str
    precision: Plan
    steps: int
    num_batches: int | None = None
    curve_of: Curve = "metric"
    workload: Callable[[int], Any] | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as plain data."""
        return self.precision.model_dump(mode="json")

    def job(self, seed: int) -> Job:
        """Train it with this seed."""
        settings = {
            "target": absolute_target(self.target),
            "plan": self.plan,
            "steps": self.steps,
            "num_batches": self.num_batches,
            "curve_of": self.curve_of,
            "change": CHANGES.get(self.name, "none"),
        }
        job = Job(self.name, seed, TRAIN, settings)
        if self.workload is None:
            return job
        build = self.workload

        def train(seed: int) -> ArmRun:
            from floatline.validation.study.trained_arm import train_job

            return train_job(job, build(seed))

        return dataclasses.replace(job, call="", function=train)


@dataclass(frozen=True)
class FunctionArm:
    """A candidate that is a function of the seed, such as a training loop of one's own. Runs in this process."""

    name: str
    function: Callable[[int], ArmRun]

    @property
    def plan(self) -> dict[str, Any]:
        """It has none."""
        return {}

    def job(self, seed: int) -> Job:
        """Call the function."""
        return Job(self.name, seed, function=self.function)


AnyCandidate = str | Plan | tuple[str, Callable[[int], ArmRun]]


def plans_of(candidates: Sequence[AnyCandidate]) -> list[Plan | tuple[str, Callable[[int], ArmRun]]]:
    """The candidates with their plans read; ComparisonError where two have one name, or train by another recipe."""
    found = [candidate if isinstance(candidate, tuple) else resolve_plan(candidate) for candidate in candidates]
    names = [candidate[0] if isinstance(candidate, tuple) else candidate.name for candidate in found]
    if not names:
        raise ComparisonError("There is no candidate. Give a plan, such as fp16-mixed.")
    for name in names:
        if names.count(name) > 1:
            raise ComparisonError(f"Two candidates have the name '{name}'. Give each once, or rename one plan.")
        if name in (NUDGED, BROKEN) or (name == REFERENCE and not _is_reference(found[names.index(name)])):
            raise ComparisonError(f"A candidate has the name '{name}', which is an arm of every study. Rename it.")
    return found


def reference_plan(candidates: Sequence[Plan | tuple[str, Any]]) -> Plan:
    """FP32 with the clipping and the accumulation of the candidates, so that only the precision differs.

    Raises:
        ComparisonError: The candidates differ in them: no one reference fits all.
    """
    plans = [candidate for candidate in candidates if isinstance(candidate, Plan)]
    fp32 = resolve_plan(REFERENCE)
    if not plans:
        return fp32
    first = plans[0]
    for plan in plans[1:]:
        for name in ("clip", "accumulate"):
            if getattr(plan, name) != getattr(first, name):
                raise ComparisonError(
                    f"Plans '{first.name}' and '{plan.name}' differ in {name}, so that no one FP32 run fits both. "
                    "Validate them one after the other."
                )
    return fp32.model_copy(update={"clip": first.clip, "accumulate": first.accumulate})


def _is_reference(candidate: Plan | tuple[str, Any]) -> bool:
    return isinstance(candidate, Plan) and candidate.compute == candidate.weights == "fp32"


def absolute_target(target: str) -> str:
    """The target with the full path of its file, so that it is found from anywhere; a module stays as it is."""
    place, colon, name = target.rpartition(":")
    if Path(target).is_file():
        return str(Path(target).absolute())
    return f"{Path(place).absolute()}{colon}{name}" if place and Path(place).is_file() else target
