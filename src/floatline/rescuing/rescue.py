"""rescue: diagnose a target, find a plan that trains as FP32 does, and verify it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from floatline.base.files import find_root
from floatline.base.plain_records import to_plain
from floatline.diagnosis.fix_trials import try_fixes
from floatline.diagnosis.islands.island import Island
from floatline.diagnosis.islands.judge import ErrorSpread
from floatline.diagnosis.islands.search import find_island
from floatline.diagnosis.result import Diagnosis
from floatline.diagnosis.target_diagnosis import diagnose, run_changed_target
from floatline.errors import FloatlineError
from floatline.fixes.finding import fix_finding
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.probe.runs.target_points import capture_points
from floatline.rescuing.candidates import IN_THE_LOOP, Candidate, locate, propose
from floatline.rescuing.finished_stages import (
    Kept,
    plain_diagnosis,
    plain_patch,
    read_diagnosis,
    read_island,
    read_patch,
)
from floatline.rescuing.result import Rescue, Stage
from floatline.rescuing.trials import Trials
from floatline.rescuing.verification import Margins, choose_margins, needs_pilot, run_pilot, verify
from floatline.training.settings import name_folder
from floatline.validation.result import Validation
from floatline.validation.running.environment import describe_environment
from floatline.validation.running.processes import Runner
from floatline.validation.signoff.approval import name_target
from floatline.validation.signoff.status import NOT_COMPARED
from floatline.validation.study.code_files import target_code
from floatline.validation.verdict.pairs import ArmRun
from floatline.workload import Target, load_target

STEPS = 40
# A plan that trains in the short run and fails the validation makes way for the next, but not for ever.
_MOST_VALIDATIONS = 2
_NO_ISLAND = frozenset(["update-lost-to-rounding", "decay-lost-to-rounding", "optimizer-state-underflow", *IN_THE_LOOP])


def rescue(
    target: str,
    *,
    folder: str | Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    budget: float = 60.0,
    prove: bool = False,
    on_progress: Callable[[str], None] | None = None,
    runner: Runner | None = None,
    spread: ErrorSpread | None = None,
) -> Rescue:
    """Find a plan under which a target trains as FP32 does, and verify it; or say what else is to be done.

    The target is diagnosed. Where precision is to blame, the smallest FP32 island is searched, plans are made of what
    was found, and each is trained for a short run until one keeps up with FP32. That one is validated over a few
    seeds. A change of the code that is known for what was found is tried without the plan, and is kept if it holds.
    Nothing of the target's code is changed. Every stage is kept in the folder as it ends: a rescue that was
    ended goes on there when it is called again.

    Args:
        target: FILE.py, package.module, or either with :name.
        folder: Where the stages are kept; `report.rescue.write_rescue` writes plan, patch and report there. None:
            floatline-runs/rescue/NAME.
        steps: Steps of the diagnosis, of the short runs and of the validation. None: 40, and validate's own number.
        seed: Of every run.
        budget: Seconds for the search of the island, and again for the short runs.
        prove: Run the full validation instead of the short one.
        on_progress: Told what is done next.
        runner: Runs the validation elsewhere, such as on a cluster.
        spread: Replays the steps of the search elsewhere.

    Raises:
        TargetError: The target cannot be run.
        RescueError: The folder cannot be used.
    """
    place = Path("floatline-runs/rescue") / name_folder(target) if folder is None else Path(folder)
    return _Rescuer(target, place, steps, seed, budget, prove, on_progress or _say_nothing, runner, spread).run()


def find_plan(target: str, *, steps: int | None = None, seed: int = 0, budget: float = 60.0) -> Rescue:
    """The same without the validation: the first plan that keeps up with FP32 in a short run is taken.

    No change of the code is tried, and so none is offered.

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
        runner: Runner | None = None,
        spread: ErrorSpread | None = None,
    ) -> None:
        self._runner, self._spread = runner, spread
        self._text, self._folder, self._steps, self._seed = target, folder, steps, seed
        self._budget, self._prove, self._say = budget, prove, say
        self._stages: list[Stage] = []
        self._notes: list[str] = []
        self._complete = True
        self._code = target_code(target, find_root()) if folder is not None else {}

    def run(self) -> Rescue:
        loaded = load_target(self._text)
        facts = {} if self._folder is None else describe_environment("")
        asked = {
            "target": name_target(self._text, find_root()),
            "code": self._code,
            "steps": self._steps,
            "seed": self._seed,
            "environment": {name: fact for name, fact in facts.items() if name not in NOT_COMPARED},
        }
        with Kept(self._folder, asked=asked, prove=self._prove) as self._kept:
            self._notes += [self._kept.note] if self._kept.note else []
            return self._run(loaded)

    def _run(self, loaded: Target) -> Rescue:
        diagnosis = self._diagnose()
        primary = diagnosis.primary
        if primary is None or diagnosis.verdict == "not-precision":
            return self._finish(diagnosis)
        if loaded.builder is None:
            self._notes.append(
                "The target has only train(), a loop of its own: it was diagnosed, and no plan was tried. "
                "Add build() for a plan."
            )
            return self._finish(diagnosis)
        workload = loaded.build(self._seed)
        base = resolve_plan(workload.precision)
        modules = [str(name) for name, _ in workload.model.named_modules() if name]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        # A rewrite in a plan is tried with the plan: the change of the code that it is made from needs no trial here.
        places = [locate(f, fix_finding(f, root=Path.cwd()), modules=modules) for f in diagnosis.findings]
        island = None if primary.cause.id in _NO_ISLAND else self._search(loaded)
        candidates = propose(base, places, island=island, scale=diagnosis.scale)
        if not candidates:
            self._notes.append(f"A plan cannot fix {primary.cause.id}.")
            return self._finish(diagnosis, island=island)
        trials = Trials(loaded, self._kept, steps=self._steps or STEPS, seed=self._seed, say=self._say)
        found = self._try(loaded, base, candidates, trials)
        self._notes += trials.notes
        return self._finish(diagnosis, island=island, trials=trials, found=found)

    def _diagnose(self) -> Diagnosis:
        known: dict[str, Any] | None = self._kept.get("diagnose", seconds=(int, float), diagnosis=dict)
        if known is None:
            began = time.monotonic()
            made = diagnose(self._text, steps=self._steps, seed=self._seed, on_progress=self._say)
            known = {"seconds": time.monotonic() - began, "diagnosis": plain_diagnosis(made)}
            self._kept.put("diagnose", known)
        diagnosis = read_diagnosis(known["diagnosis"])
        primary, text = diagnosis.primary, diagnosis.verdict
        if primary is not None:
            text = f"{primary.cause.id} at {Path(primary.file).name or primary.where}"
        self._end_stage("diagnose", known["seconds"], text)
        return diagnosis

    def _search(self, loaded: Target) -> Island | None:
        known = self._kept.get("island", seconds=(int, float), text=str, island=(dict, NoneType))
        if known is None:
            known = self._make_search(loaded)
            self._kept.put("island", known)
        island = None if known["island"] is None else read_island(known["island"])
        self._end_stage("island", known["seconds"], known["text"])
        return island

    def _make_search(self, loaded: Target) -> dict[str, Any]:
        began, island = time.monotonic(), None
        self._say("capturing steps for the search of the FP32 island")
        try:
            points = capture_points(loaded, steps=self._steps or STEPS, seed=self._seed)
            log = self._kept.folder("search")
            island = find_island(points, budget=self._budget, on_progress=self._say, folder=log, spread=self._spread)
            text = ", ".join(island.modules) or island.reason
        except Exception as error:  # the user's code on replays: the search is a help, and not needed
            text = f"no search: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return {"seconds": time.monotonic() - began, "text": text, "island": to_plain(island)}

    def _try(
        self, loaded: Target, base: Plan, candidates: tuple[Candidate, ...], trials: Trials
    ) -> tuple[Candidate, Validation | None, Margins | None] | None:
        """The first plan that keeps up with FP32 and passes the validation; else the first that keeps up."""
        candidates = trials.prepare(base, candidates)
        deadline, first, validations = time.monotonic() + self._budget, None, 0
        for candidate in candidates:
            if time.monotonic() > deadline:
                self._notes.append("The budget was used up before all plans were tried.")
                self._complete = False
                break
            kept_up = trials.try_out(candidate)
            if kept_up is None:
                continue
            self._end_stage("plan", trials.take_seconds(), kept_up.does)
            if self._folder is None:
                return kept_up, None, None
            validations += 1
            margins = choose_margins(self._pilot(loaded, kept_up.plan, trials), prove=self._prove)
            validation = self._verify(loaded, kept_up.plan, margins, validations)
            first = first or (kept_up, validation, margins)
            if validation is not None and validation.verdict == "PASS":
                return kept_up, validation, margins
            # Only what is shown to be worse speaks against the plan; the rest says that more seeds are needed.
            if validation is None or validation.verdict != "FAIL" or validations == _MOST_VALIDATIONS:
                break
            deadline = time.monotonic() + self._budget
        if first is None:
            self._end_stage("plan", trials.take_seconds(), "none of the plans trains as FP32 does")
        return first

    def _pilot(self, loaded: Target, plan: Plan, trials: Trials) -> ArmRun | None:
        """FP32 for as long as the validation trains, where its short run does not say how small the metric gets."""
        if not needs_pilot(trials.fp32, steps=self._steps):
            return None
        known = self._kept.get("pilot", run=(dict, NoneType))
        if known is None:
            self._say("training in FP32 to settle the margins")
            run = run_pilot(loaded, plan, steps=self._steps, seed=self._seed)
            known = {"run": None if run is None else run.as_json()}
            self._kept.put("pilot", known)
        return None if known["run"] is None else ArmRun.from_json(known["run"])

    def _verify(self, loaded: Target, plan: Plan, margins: Margins, number: int) -> Validation | None:
        self._say("validating the plan against FP32")
        study = self._kept.folder(f"{'full' if self._prove else 'short'}-{number}")
        if study is None:
            raise AssertionError  # a plan is verified only where there is a folder
        began = time.monotonic()
        try:
            validation = verify(
                loaded, plan, margins,
                steps=self._steps, seed=self._seed, prove=self._prove, folder=study, say=self._say, runner=self._runner,
            )  # fmt: skip
        except FloatlineError as error:
            self._notes.append(f"The validation was not made: {error}")
            self._end_stage("validate", time.monotonic() - began, str(error))
            return None
        # One that went on was not all made now.
        seconds = max(time.monotonic() - began, 0.0 if self._prove else sum(r.seconds or 0.0 for r in validation.runs))
        self._end_stage("validate", seconds, f"{validation.verdict}: {validation.best.reason}")
        return replace(validation, seconds=seconds)

    def _try_patch(self, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis with a change of the code that holds without the plan; else with what was tried."""
        if diagnosis.primary is None or self._folder is None:
            return diagnosis
        known: dict[str, Any] | None = self._kept.get("patch", seconds=(int, float), patch=dict)
        if known is None:
            began = time.monotonic()
            made = try_fixes(diagnosis, self._run_changed, root=Path.cwd(), say=self._say)
            known = {"seconds": time.monotonic() - began, "patch": plain_patch(made)}
            self._kept.put("patch", known)
        tried = read_patch(diagnosis, known["patch"])
        if tried.primary is not None and tried.primary.tried:
            self._end_stage("patch", known["seconds"], tried.primary.tried)
        return tried

    def _run_changed(self, sources: Mapping[str, str]) -> Diagnosis | str:
        return run_changed_target(self._text, sources, steps=self._steps, seed=self._seed)

    def _finish(
        self,
        diagnosis: Diagnosis,
        *,
        island: Island | None = None,
        trials: Trials | None = None,
        found: tuple[Candidate, Validation | None, Margins | None] | None = None,
    ) -> Rescue:
        diagnosis = self._try_patch(diagnosis)
        chosen, validation, margins = found or (None, None, None)
        if margins is not None and margins.note:
            self._notes.append(margins.note)
        return Rescue(
            target=self._text,
            diagnosis=diagnosis,
            steps=self._steps or STEPS,
            plan=None if chosen is None else chosen.plan,
            does="" if chosen is None else chosen.does,
            island=island,
            tried=() if trials is None else tuple(trials.tried),
            validation=validation,
            margin="" if margins is None else margins.words,
            proved=self._prove,
            stages=tuple(self._stages),
            notes=tuple(self._notes),
            complete=self._complete,
            code=self._code,
            curves={} if trials is None else trials.curves_of(chosen),
        )

    def _end_stage(self, name: str, seconds: float, text: str) -> None:
        self._stages.append(Stage(name, round(seconds, 3), text))


def _say_nothing(_text: str) -> None:
    pass
