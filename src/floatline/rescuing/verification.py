"""Verification: a rescue's plan against FP32, by `validate` in a short form, or by the full one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from floatline.plans import Plan
from floatline.rescuing.short_run import Trial
from floatline.validation.result import Validation
from floatline.validation.running.processes import Runner
from floatline.validation.study.arms import PlanArm, reference_plan
from floatline.validation.study.limits import Limits
from floatline.validation.study.study import Silence
from floatline.validation.target_study import validate
from floatline.validation.verdict.pairs import REFERENCE, ArmRun
from floatline.validation.verdict.power import say_left
from floatline.validation.verdict.terms import MARGINS, Scale
from floatline.workload import Target, Workload

SHORT = (0.05, 0.10)
# A margin may be so much of what FP32 learnt, where that is more than the same margin of the metric.
PART_OF_GAIN = 0.2


@dataclass(frozen=True)
class Margins:
    """How near to FP32 a plan must come.

    Args:
        scale: As `validate` takes it.
        values: PASS up to the first, FAIL from the second on.
        words: The first one for people.
        note: Why it is not the usual one; '' where it is.
    """

    scale: Scale
    values: tuple[float, float]
    words: str
    note: str = ""


def usual_margins(*, prove: bool) -> Margins:
    """Shares of the metric itself: 1 and 2 % in a proof, 5 and 10 % in the short form."""
    first, second = MARGINS if prove else SHORT
    return Margins("log", (first, second), f"{100 * first:g} %")


def settle_margins(pilot: ArmRun, *, prove: bool) -> Margins:
    """The margins for a metric that is better when lower, from one FP32 run alone, before any plan is looked at.

    A share of a loss that goes to zero is less than FP32 differs from itself, and no comparison can be made. Then the
    margins are a share of what FP32 learnt, a fifth of the usual one. Both are the same where FP32 ends at a sixth of
    its start, and the larger one is taken.

    Numerics:
        The usual margin m of the metric at the end, m * end, against m / 5 * (start - end). Checked by
        tests/rescuing/test_margins.py.

    Args:
        pilot: FP32, one seed; `start` and `metric` are read.
        prove: Whether the margins are those of a proof.
    """
    usual = usual_margins(prove=prove)
    start, end = pilot.start, pilot.metric
    if pilot.error or start is None or not math.isfinite(start) or not math.isfinite(end) or end >= start:
        return usual
    gain = start - end
    share = PART_OF_GAIN * usual.values[0]
    if usual.values[0] * end >= share * gain:
        return usual
    first, second = (PART_OF_GAIN * value * gain for value in usual.values)
    return Margins(
        "difference",
        (first, second),
        f"{100 * share:g} % of what FP32 learnt",
        f"In FP32 the metric goes from {start:.4g} to {end:.4g}. {usual.words} of so little is no measure: the margins "
        f"are {100 * share:g} and {200 * share:g} % of the {gain:.4g} that FP32 learnt.",
    )


# The short form looks at 3, 5 and 8 seeds.
SHORT_SEEDS = 8
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


class Speaker(Silence):
    """Says how far a validation is."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def ran(self, run: ArmRun, *, left: int, seconds: float | None) -> None:
        """Say which run is done."""
        to_go = say_left(left, seconds)
        self._say(f"validating the plan against FP32: {run.arm}, seed {run.seed} is done; {to_go}")

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
            scale=margins.scale, margins=margins.values, watcher=Speaker(say), runner=runner,
        )  # fmt: skip
    else:
        # In this process: to start others for each run would take longer than short runs do.
        validation = validate(
            target.build if runner is None else target.text, [plan],
            steps=steps, seed=seed, folder=folder, resume=resume, runner=runner,
            scale=margins.scale, margins=margins.values, max_seeds=SHORT_SEEDS, broken=False, measure=False,
            watcher=Speaker(say),
        )  # fmt: skip
    words = ["floatline", "rescue", target.text, "--seed", str(seed)]
    words += [] if steps is None else ["--steps", str(steps)]
    words += ["--prove"] if prove else []
    return replace(validation, target=target.text, reproduce=shlex.join(words))
