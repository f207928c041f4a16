"""rescue: diagnose a target, find a plan that trains as FP32 does, and verify it."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from floatline.diagnosis.diagnose import diagnose
from floatline.diagnosis.island import Island
from floatline.diagnosis.result import Diagnosis
from floatline.diagnosis.search import find_island
from floatline.errors import FloatlineError
from floatline.fixes.code_fix import CodeFix
from floatline.fixes.finding import fix_finding
from floatline.plan import Clip, Plan
from floatline.presets import resolve_plan
from floatline.probe.target_points import capture_points
from floatline.rescue.places import locate
from floatline.rescue.remedies import IN_THE_LOOP, Candidate, propose, with_update
from floatline.rescue.result import Rescue, Stage, Tried
from floatline.rescue.trial import Trial, find_shortfall, run_trial
from floatline.validate.result import Validation
from floatline.validate.target_study import validate
from floatline.workload import Target, load_target

STEPS = 40
# A bound that no gradient meets: a guard clips to 1 where a plan says nothing.
UNCLIPPED = Clip(max_norm=1e30)
# The short form: the looks are at 3 and 5 seeds, and the margins are wider than those of a proof.
SHORT_SEEDS = 5
SHORT_MARGINS = (0.05, 0.10)
# A plan that trains in the short run and fails the validation makes way for the next, but not for ever.
_MOST_VALIDATIONS = 2
_NO_ISLAND = frozenset(["update-lost-to-rounding", "optimizer-state-underflow", *IN_THE_LOOP])


def rescue(
    target: str,
    *,
    folder: str | Path,
    steps: int | None = None,
    seed: int = 0,
    budget: float = 60.0,
    prove: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Rescue:
    """Find a plan under which a target trains as FP32 does, and verify it; or say what else is to be done.

    The target is diagnosed. Where precision is to blame, the smallest FP32 island is searched, plans are made of what
    was found, and each is trained for a short run until one keeps up with FP32. That one is validated over a few
    seeds. Nothing of the target's code is changed.

    Args:
        target: FILE.py, package.module, or either with :name.
        folder: Where the study of the validation is kept.
        steps: Steps of the diagnosis, of the short runs and of the validation. None: 40, and validate's own number.
        seed: Of every run.
        budget: Seconds for the search of the island, and again for the short runs.
        prove: Run the full validation in place of the short one.
        on_progress: Told what is done next.

    Raises:
        TargetError: The target cannot be run.
    """
    return _Rescuer(target, Path(folder), steps, seed, budget, prove, on_progress or _say_nothing).run()


def find_plan(target: str, *, steps: int | None = None, seed: int = 0, budget: float = 60.0) -> Rescue:
    """The same without the validation: the first plan that keeps up with FP32 in a short run is taken.

    Args:
        target: FILE.py, package.module, or either with :name.
        steps: Steps of the diagnosis and of the short runs. None: 40.
        seed: Of every run.
        budget: Seconds for the search of the island, and again for the short runs.
    """
    return _Rescuer(target, None, steps, seed, budget, False, _say_nothing).run()


class _Rescuer:
    def __init__(
        self,
        target: str,
        folder: Path | None,
        steps: int | None,
        seed: int,
        budget: float,
        prove: bool,
        say: Callable[[str], None],
    ) -> None:
        self._text, self._folder, self._steps, self._seed = target, folder, steps, seed
        self._budget, self._prove, self._say = budget, prove, say
        self._stages: list[Stage] = []
        self._notes: list[str] = []
        self._tried: list[Tried] = []
        self._began = time.monotonic()

    def run(self) -> Rescue:
        loaded = load_target(self._text)
        diagnosis = diagnose(self._text, steps=self._steps, seed=self._seed, on_progress=self._say)
        primary = diagnosis.primary
        self._end_stage(
            "diagnose",
            diagnosis.verdict
            if primary is None
            else f"{primary.cause.id} at {Path(primary.file).name or primary.where}",
        )
        fixes = [fix_finding(finding, root=Path.cwd()) for finding in diagnosis.findings]
        if primary is None or diagnosis.verdict == "not-precision":
            return self._finish(diagnosis, fixes)
        if loaded.builder is None:
            self._notes.append(
                "The target has only train(), a loop of its own: it was diagnosed, and no plan was tried. "
                "Add build() for a plan."
            )
            return self._finish(diagnosis, fixes)
        workload = loaded.build(self._seed)
        base = resolve_plan(workload.precision)
        modules = [str(name) for name, _ in workload.model.named_modules() if name]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        places = [locate(f, fix, modules=modules) for f, fix in zip(diagnosis.findings, fixes, strict=True)]
        island = None if primary.cause.id in _NO_ISLAND else self._search(loaded)
        candidates = propose(base, places, island=island, scale=diagnosis.scale)
        if not candidates:
            self._notes.append(f"A plan cannot mend {primary.cause.id}.")
        chosen, validation = self._try(loaded, base, candidates)
        return self._finish(diagnosis, fixes, chosen=chosen, island=island, validation=validation)

    def _search(self, loaded: Target) -> Island | None:
        self._say("capturing steps for the search of the FP32 island")
        try:
            points = capture_points(loaded, steps=self._steps or STEPS, seed=self._seed)
            island = find_island(points, budget=self._budget, on_progress=self._say)
        except Exception as error:  # the user's code on replays: the search is a help, and not needed
            said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            self._end_stage("island", f"no search: {said}")
            return None
        self._end_stage("island", ", ".join(island.modules) or island.reason)
        return island

    def _try(
        self, loaded: Target, base: Plan, candidates: tuple[Candidate, ...]
    ) -> tuple[Candidate | None, Validation | None]:
        """The first plan that keeps up with FP32 and passes the validation; else the first that keeps up."""
        if not candidates:
            return None, None
        steps, chosen = self._steps or STEPS, None
        fp32, clip = self._train_fp32(loaded, candidates[0].plan, steps)
        candidates = tuple(replace(c, plan=_with_clip(c.plan, clip)) for c in candidates)
        self._compare(loaded, _with_clip(with_update(base), clip), fp32, first=candidates[0].plan, steps=steps)
        deadline, validations = time.monotonic() + self._budget, 0
        best: tuple[Candidate, Validation] | None = None
        for candidate in candidates:
            if time.monotonic() > deadline:
                self._notes.append("The budget was used up before all plans were tried.")
                break
            self._say(f"trying {candidate.does}")
            trial = run_trial(loaded, candidate.plan, steps=steps, seed=self._seed)
            lacks = find_shortfall(trial, fp32)
            self._tried.append(Tried(candidate.does, candidate.why, lacks, trial.seconds))
            if lacks:
                continue
            chosen = candidate
            self._end_stage("plan", candidate.does)
            if self._folder is None:
                break
            validation = self._validate(loaded, candidate, self._folder)
            validations += 1
            if validation is not None and best is None:
                best = candidate, validation
            if validation is not None and validation.verdict == "PASS":
                return candidate, validation
            # Only what is shown to be worse speaks against the plan; the rest says that more seeds are needed.
            if validation is None or validation.verdict != "FAIL" or validations == _MOST_VALIDATIONS:
                break
            deadline = time.monotonic() + self._budget
        if best is not None:
            return best
        if chosen is None:
            self._end_stage("plan", "none of the plans trains as FP32 does")
        return chosen, None

    def _compare(self, loaded: Target, plan: Plan, fp32: Trial, *, first: Plan, steps: int) -> None:
        """Train without a remedy: what a plan mends must be seen to fail without it."""
        words = {"name", "reasons", "scaling"}
        if plan.model_dump(exclude=words) == first.model_dump(exclude=words):
            return
        self._say("training with nothing changed")
        given = run_trial(loaded, plan, steps=steps, seed=self._seed)
        lacks = find_shortfall(given, fp32)
        does = "nothing changed" if plan.weights == "fp32" else f"nothing but {plan.update} updates"
        self._tried.append(Tried(does, "for comparison", lacks, given.seconds))
        if not lacks:
            self._notes.append(f"With {does} it keeps up, too, in so short a run: what was found shows in no loss yet.")

    def _train_fp32(self, loaded: Target, plan: Plan, steps: int) -> tuple[Trial, Clip | None]:
        """FP32 for comparison, clipped as the plan says; and the plan's own clip, or none where the guard's hurts."""
        self._say("training in FP32 for comparison")
        fp32 = resolve_plan("fp32").model_copy(update={"clip": plan.clip, "accumulate": plan.accumulate})
        clipped = run_trial(loaded, fp32, steps=steps, seed=self._seed)
        if plan.clip is not None:
            return clipped, plan.clip
        free = run_trial(loaded, fp32.model_copy(update={"clip": UNCLIPPED}), steps=steps, seed=self._seed)
        if free.error or not find_shortfall(clipped, free):
            return clipped, None
        self._notes.append("FP32 itself trains worse with gradients clipped to 1, so the plan does not clip.")
        return free, UNCLIPPED

    def _validate(self, loaded: Target, candidate: Candidate, folder: Path) -> Validation | None:
        self._say("validating the plan against FP32")
        study = next(path for n in itertools.count(1) if not (path := folder / f"study-{n}").exists())
        try:
            if self._prove:
                validation = validate(self._text, [candidate.plan], steps=self._steps, seed=self._seed, folder=study)
            else:
                # In this process: to start others for each run would take longer than short runs do.
                validation = validate(
                    loaded.build, [candidate.plan], steps=self._steps, seed=self._seed, folder=study,
                    margins=SHORT_MARGINS, max_seeds=SHORT_SEEDS, broken=False, measure=False,
                )  # fmt: skip
                words = ["floatline", "rescue", self._text, "--seed", str(self._seed)]
                words += [] if self._steps is None else ["--steps", str(self._steps)]
                validation = replace(validation, target=self._text, reproduce=shlex.join(words))
        except FloatlineError as error:
            self._notes.append(f"The validation was not made: {error}")
            self._end_stage("validate", str(error))
            return None
        self._end_stage("validate", f"{validation.verdict}: {validation.best.reason}")
        return validation

    def _finish(
        self,
        diagnosis: Diagnosis,
        fixes: list[CodeFix | None],
        *,
        chosen: Candidate | None = None,
        island: Island | None = None,
        validation: Validation | None = None,
    ) -> Rescue:
        return Rescue(
            target=self._text,
            diagnosis=diagnosis,
            steps=self._steps or STEPS,
            plan=None if chosen is None else chosen.plan,
            does="" if chosen is None else chosen.does,
            island=island,
            tried=tuple(self._tried),
            fixes=tuple(fix for fix in fixes if fix is not None),
            validation=validation,
            proved=self._prove,
            stages=tuple(self._stages),
            notes=tuple(self._notes),
        )

    def _end_stage(self, name: str, text: str) -> None:
        now = time.monotonic()
        self._stages.append(Stage(name, round(now - self._began, 3), text))
        self._began = now


def _with_clip(plan: Plan, clip: Clip | None) -> Plan:
    if clip == plan.clip:
        return plan
    reasons = {**plan.reasons, "clip": "FP32 itself trains worse with the guard's own clipping to a norm of 1."}
    return plan.model_copy(update={"clip": clip, "reasons": reasons})


def _say_nothing(_text: str) -> None:
    pass
