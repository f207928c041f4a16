"""Subject: what a study is about, looked at once before the first arm, and the arms made of it."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from floatline.base.files import find_root
from floatline.errors import ComparisonError, TargetError
from floatline.plans import Plan
from floatline.plans.presets import PLANS
from floatline.validation.running.environment import describe_environment
from floatline.validation.running.processes import call_in_child
from floatline.validation.study.arms import Arm, Curve, FunctionArm, PlanArm
from floatline.validation.study.code_files import target_code
from floatline.validation.study.limits import NUM_CHECKPOINTS, Limits
from floatline.validation.verdict.pairs import BROKEN, NUDGED, REFERENCE, ArmRun
from floatline.validation.verdict.terms import Terms, words_of
from floatline.workload import Target, Workload, load_target

# The first sets things up; of the others the median counts.
_TRIAL_STEPS = 4
# Evaluating on the way may cost this much of the training; what costs more is evaluated at the end only.
_MOST_EVALUATING = 0.5


@dataclass(frozen=True)
class Inspection:
    """What was found out about a target.

    Args:
        metric: Name of its metric: that of its evaluate function, or 'loss'.
        num_batches: Batches that it has.
        step_seconds: One FP32 step, roughly.
        evaluate_seconds: One evaluation.
        higher_is_better: As the workload says; None: it does not say.
    """

    metric: str
    num_batches: int
    step_seconds: float
    evaluate_seconds: float
    higher_is_better: bool | None = None

    def curve_of(self, steps: int) -> Literal["metric", "loss"]:
        """What to record on the way: the metric where that is cheap against so many steps, else the training loss."""
        evaluating = (NUM_CHECKPOINTS - 1) * self.evaluate_seconds
        return "metric" if evaluating <= _MOST_EVALUATING * steps * self.step_seconds else "loss"


def inspect_target(settings: dict[str, Any]) -> dict[str, Any]:
    """Called in a child process: load the target, and look at it."""
    target = load_target(settings["target"])
    if target.builder is None:
        raise TargetError(
            f"Target '{target.text}' has only train(), which cannot be started twice from the same weights. Add "
            "build(), or run it as a command with --baseline and --candidate."
        )
    return vars(inspect_workload(target.build(settings["seed"]), settings))


def inspect_workload(workload: Workload, settings: dict[str, Any]) -> Inspection:
    """Evaluate a workload once, and take a few steps of it."""
    # Whoever only reads an inspection needs no torch.
    from floatline.plans import Plan
    from floatline.training.settings import shared_policy
    from floatline.training.trainer import Trainer
    from floatline.validation.study.trained_arm import first_batches

    metric, higher = workload.metric_name, workload.higher_is_better
    num_batches = len(workload.batches)
    workload = first_batches(workload, settings["num_batches"])
    trainer = Trainer(
        workload,
        plan=Plan(**settings["plan"]),
        policy=shared_policy(workload),
        folder=None,
        steps=_TRIAL_STEPS,
        seed=settings["seed"],
    )
    began = time.monotonic()
    trainer.measure()
    evaluated = time.monotonic()
    seconds = evaluated - began
    times: list[float] = []
    for _ in range(_TRIAL_STEPS):
        began = time.monotonic()
        trainer.step()
        trainer.guard.drain()
        times.append(time.monotonic() - began)
    trainer.guard.close()
    return Inspection(metric, num_batches, statistics.median(times[1:]), seconds, higher)


Candidate = Plan | tuple[str, Callable[[int], ArmRun]]


@dataclass(frozen=True)
class Subject:
    """A target, its candidates and how long each arm trains.

    Args:
        text: The target as the user wrote it, or the name of the function that builds it.
        candidates: Plans, and functions with a name.
        reference: FP32, with the candidates' clipping and accumulation.
        limits: How long.
        seed: The first seed.
        build: Builds the workload here, where no other process could.
    """

    text: str
    candidates: Sequence[Candidate]
    reference: Plan
    limits: Limits
    seed: int
    build: Callable[[int], Workload] | None = None

    @classmethod
    def of(
        cls,
        target: str | Callable[..., Any],
        candidates: Sequence[Candidate],
        reference: Plan,
        limits: Limits,
        *,
        seed: int,
    ) -> Subject:
        """The subject of a target, or of a function that builds a workload."""
        if isinstance(target, str):
            return cls(target, candidates, reference, limits, seed)
        if not callable(target):
            raise TargetError(f"The target is a {type(target).__name__}. Give its path, or a function that builds it.")
        text = str(getattr(target, "__name__", "workload"))
        return cls(text, candidates, reference, limits, seed, Target(text, target, None, Path.cwd()).build)

    @property
    def asked(self) -> dict[str, Any]:
        """What a study that is resumed must have in common with the one that was begun."""
        names = [c.name if isinstance(c, Plan) else c[0] for c in self.candidates]
        return {
            "target": self.text,
            "code": dict.fromkeys(names, target_code(self.text, find_root()) if self.build is None else {}),
            "plans": {
                name: c.model_dump(mode="json") if isinstance(c, Plan) else {}
                for name, c in zip(names, self.candidates, strict=True)
            },
            "limits": vars(self.limits),
            "seed": self.seed,
        }

    def settings(self) -> dict[str, Any]:
        """What a child process needs to build it."""
        return {"target": self.text, "seed": self.seed, "num_batches": self.limits.batches}

    def inspect(self, curve: Curve | None) -> dict[str, Any]:
        """Look at the target, and settle steps and curve for all arms; plain data.

        Args:
            curve: What is taken on the way; None: the metric, where that is cheap.

        Raises:
            TargetError: It cannot be loaded, built or trained for a few steps in FP32.
        """

        asked = {**self.settings(), "plan": self.reference.model_dump(mode="json")}
        if self.build is not None:
            seen = inspect_workload(self.build(self.seed), asked)
        else:
            try:
                seen = Inspection(**call_in_child("floatline.validation.study.preparation:inspect_target", asked))
            except ComparisonError as error:
                raise TargetError(str(error)) from None
        steps = self.limits.steps_of(seen.num_batches, self.reference.accumulate)
        return {
            "metric": seen.metric,
            "higher_is_better": seen.higher_is_better,
            "num_batches": seen.num_batches,
            "steps": steps,
            "curve_of": curve or seen.curve_of(steps),
            "environment": describe_environment(self.text if self.build is None else ""),
        }

    def make_arms(self, found: dict[str, Any], *, broken: bool) -> list[Arm]:
        """FP32, nudged FP32, the broken arm and the candidates."""
        curve_of: Curve = found["curve_of"]

        def arm(name: str, plan: Plan) -> PlanArm:
            return PlanArm(name, self.text, plan, found["steps"], self.limits.batches, curve_of, self.build)

        arms: list[Arm] = [arm(REFERENCE, self.reference), arm(NUDGED, self.reference)]
        for candidate in self.candidates:
            if not isinstance(candidate, Plan):
                arms.append(FunctionArm(*candidate))
            elif candidate.name != REFERENCE:
                arms.append(arm(candidate.name, candidate))
        return [*arms, arm(BROKEN, self.reference)] if broken else arms


def reproduce(subject: Subject, terms: Terms, curve: Curve | None = None, more: Sequence[str] = ()) -> str:
    """The command that does it again; '' where a function takes part, which no command can name."""
    if subject.build is not None or any(isinstance(candidate, tuple) for candidate in subject.candidates):
        return ""
    words = ["floatline", "validate", subject.text]
    for candidate in subject.candidates:
        words += ["--plan", _word_of(candidate) if isinstance(candidate, Plan) else ""]
    for name, value in vars(subject.limits).items():
        words += [] if value is None else [f"--{name}", str(value)]
    words += ["--higher-is-better"] if terms.higher_is_better else []
    words += ["--curve", curve] if curve is not None else []
    return shlex.join([*words, *words_of(terms), *more, "--seed", str(subject.seed)])


def _word_of(plan: Plan) -> str:
    """A preset's name; any other plan must lie in a file of its own."""
    return plan.name if PLANS.get(plan.name) == plan else f"{plan.name}.yaml"
