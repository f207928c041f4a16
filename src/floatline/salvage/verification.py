"""Verification: a rescue's plan against FP32, by `validate` in a short form, or by the full one."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from floatline.plan import Plan
from floatline.salvage.margins import Margins, settle_margins, usual_margins
from floatline.salvage.trial import Trial
from floatline.validate.arms import PlanArm, reference_plan
from floatline.validate.limits import Limits
from floatline.validate.pairs import REFERENCE, ArmRun
from floatline.validate.processes import Runner
from floatline.validate.result import Validation
from floatline.validate.study import Silence
from floatline.validate.target_study import validate
from floatline.workload import Target, Workload

# The short form looks at 3 and at 5 seeds.
SHORT_SEEDS = 5
# FP32 that keeps so much of its loss in a run as long as the validation's does not go to zero there.
_KEEPS = 0.5


def needs_pilot(fp32: Trial, *, steps: int | None) -> bool:
    """Whether FP32's short run leaves open if the metric goes to zero in a validation of so many steps."""
    begin, end = fp32.way
    return steps is None or not end > _KEEPS * begin


def run_pilot(target: Target, plan: Plan, *, steps: int | None, seed: int) -> ArmRun | None:
    """FP32 for as long as the validation trains; None where the metric is better when higher, and cannot vanish."""
    workload = target.build(seed)
    if workload.higher_is_better:
        return None
    length = Limits(steps).steps_of(len(workload.batches), plan.accumulate)
    return _arm(target, reference_plan([plan]), length).job(seed).run()


def _arm(target: Target, plan: Plan, steps: int) -> PlanArm:
    def build(seed: int) -> Workload:
        return target.build(seed)

    return PlanArm(REFERENCE, target.text, plan, steps, None, "loss", build)


def choose_margins(pilot: ArmRun | None, *, prove: bool) -> Margins:
    """The margins, known before the first arm runs."""
    return usual_margins(prove=prove) if pilot is None else settle_margins(pilot, prove=prove)


class _Speaker(Silence):
    """Says how far a validation is."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def ran(self, run: ArmRun, *, left: int) -> None:
        """Say which run is done."""
        self._say(f"validating the plan against FP32: {run.arm}, seed {run.seed} is done, {left} up to the next look")

    def measuring(self, what: str) -> None:
        """Say what is measured."""
        self._say(f"measuring {what}")


def verify(
    target: Target,
    plan: Plan,
    margins: Margins,
    *,
    steps: int | None,
    seed: int,
    prove: bool,
    folder: Path,
    say: Callable[[str], None],
    runner: Runner | None = None,
) -> Validation:
    """Validate a plan; a study that was ended goes on.

    Args:
        target: What is trained.
        plan: The plan.
        margins: How near to FP32.
        steps: Of every arm; None: as many as `validate` takes.
        seed: The first seed.
        prove: The full validation: up to 20 seeds, a broken arm, speed, memory and layers.
        folder: Of the study.
        say: Told how far it is.
        runner: Runs the arms elsewhere.

    Raises:
        FloatlineError: The validation cannot be made.
    """
    resume = (folder / "study.json").is_file()
    if prove:
        validation = validate(
            target.text, [plan], steps=steps, seed=seed, folder=folder, resume=resume,
            scale=margins.scale, margins=margins.values, watcher=_Speaker(say), runner=runner,
        )  # fmt: skip
    else:
        # In this process: to start others for each run would take longer than short runs do.
        validation = validate(
            target.build if runner is None else target.text, [plan],
            steps=steps, seed=seed, folder=folder, resume=resume, runner=runner,
            scale=margins.scale, margins=margins.values, max_seeds=SHORT_SEEDS, broken=False, measure=False,
            watcher=_Speaker(say),
        )  # fmt: skip
    words = ["floatline", "rescue", target.text, "--seed", str(seed)]
    words += [] if steps is None else ["--steps", str(steps)]
    words += ["--prove"] if prove else []
    return replace(validation, target=target.text, reproduce=shlex.join(words))
