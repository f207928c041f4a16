"""rescue_script: diagnose a script, find a change of its source or a plan that trains as FP32 does, and verify it."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from floatline.base.files import find_root
from floatline.base.plain_records import to_plain
from floatline.diagnosis.result import Diagnosis
from floatline.diagnosis.scripts.script import LONG_START, diagnose_script
from floatline.errors import FloatlineError, RescueError
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.rescuing.candidates import Candidate, locate, propose, with_own_scaling, with_update
from floatline.rescuing.finished_stages import (
    Kept,
    plain_diagnosis,
    plain_patch,
    read_diagnosis,
    read_patch,
    read_trial,
)
from floatline.rescuing.result import Rescue, Stage, Tried
from floatline.rescuing.short_run import Trial, find_shortfall
from floatline.rescuing.trials import lower_scale, searches_long, settle_scale
from floatline.rescuing.verification import SHORT_SEEDS, Margins, Speaker, settle_margins, usual_margins
from floatline.running.command import parse_launched
from floatline.validation.result import Validation
from floatline.validation.running.environment import describe_environment
from floatline.validation.script_study import check_metric, check_seeds, name_script, validate_script
from floatline.validation.signoff.status import NOT_COMPARED
from floatline.validation.study.code_files import command_code
from floatline.validation.study.script_arms import LOSS, ScriptArm, run_script
from floatline.validation.verdict.pairs import ArmRun, pair_up
from floatline.validation.verdict.terms import LOOKS

# Steps of a trial where nothing says that more are needed.
STEPS = 40
_SEED = "{seed}"
_MOST_VALIDATIONS = 2


def rescue_script(
    words: Sequence[str],
    *,
    folder: str | Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    budget: float = 600.0,
    prove: bool = False,
    metric: str = LOSS,
    higher_is_better: bool | None = None,
    device: Literal["", "cuda"] = "",
    timeout: float | None = None,
    on_progress: Callable[[str], None] | None = None,
    on_start: Callable[[str], None] | None = None,
) -> Rescue:
    """Find a change of a script's source, or a plan, with which it trains as FP32 does, and verify it.

    The script runs as it is and is diagnosed. A change of its own lines that is known for what was found is tried,
    then plans, which are put into force from outside; each for some steps, against FP32 from the same seed. The first
    that keeps up is validated over a few seeds. The script is not edited, and what it writes in all runs but the first
    goes to the folder of the rescue. Every stage is kept as it ends.

    Args:
        words: The command: 'python', 'train.py' and so on; `{seed}` is filled in.
        folder: Where the stages are kept. None: floatline-runs/rescue/NAME.
        steps: Steps of each trial and of the validation. None: as many as the failure took to show, and 40 at least;
            in the validation, all that the script makes.
        seed: Of every run.
        budget: Seconds for trying plans.
        prove: Run the full validation instead of the short one.
        metric: By which the validation compares; see `validate_script`.
        higher_is_better: Of the metric. None: lower, unless its name reads otherwise, which is then asked for.
        device: 'cuda' runs a script that is written for a GPU on the CPU, where there is none.
        timeout: Seconds that one run of the validation may take.
        on_progress: Told what is done next.
        on_start: Told before the run that has the script's own output. None: `on_progress` is.

    Raises:
        TargetError: The command runs no Python code.
        RescueError: The folder cannot be used.
        ComparisonError: No validation can be made by the metric.
    """
    parse_launched(list(words))  # both now, and not after all trials
    higher = check_metric(metric, higher_is_better)
    place = Path("floatline-runs/rescue") / name_script(words) if folder is None else Path(folder)
    settings = _Settings(tuple(words), place, steps, seed, budget, prove, metric, higher, device, timeout)
    return _ScriptRescuer(settings, on_progress or _say_nothing, on_start).run()


@dataclass(frozen=True)
class _Settings:
    words: tuple[str, ...]
    folder: Path
    steps: int | None
    seed: int
    budget: float
    prove: bool
    metric: str
    higher_is_better: bool
    device: Literal["", "cuda"]
    timeout: float | None

    @property
    def shifts(self) -> bool:
        """Whether the script's own seeds are raised, since its command has no place for one."""
        return not any(_SEED in word for word in self.words)


@dataclass(frozen=True)
class _Way:
    """Something that may rescue the script: a plan, or changed sources.

    Args:
        does: What it changes.
        why: What speaks for it.
        plan: The plan; None where the script decides itself.
        sources: Changed texts by path.
    """

    does: str
    why: str
    plan: Plan | None = None
    sources: dict[str, str] = field(default_factory=dict[str, str])


class _ScriptRescuer:
    def __init__(
        self, settings: _Settings, say: Callable[[str], None], say_start: Callable[[str], None] | None
    ) -> None:
        self._given, self._say, self._say_start = settings, say, say_start
        self._stages: list[Stage] = []
        self._notes: list[str] = []
        self._tried: list[Tried] = []
        self._curves: dict[str, tuple[float, ...]] = {}
        self._complete = True
        self._text = shlex.join(settings.words)
        self._code = command_code(self._text, Path.cwd(), find_root())

    def run(self) -> Rescue:
        given, facts = self._given, describe_environment(self._given.device)
        asked = {
            "target": self._text,
            "code": self._code,
            "steps": given.steps,
            "seed": given.seed,
            "environment": {name: fact for name, fact in facts.items() if name not in NOT_COMPARED},
        }
        with Kept(given.folder, asked=asked, prove=given.prove) as self._kept:
            self._notes += [self._kept.note] if self._kept.note else []
            diagnosis = self._diagnose()
            self._steps = given.steps or max(STEPS, diagnosis.num_steps)
            if diagnosis.verdict == "healthy":
                return self._finish(diagnosis)
            ways = self._find_ways(diagnosis)
            if not ways:
                what = "this" if diagnosis.primary is None else diagnosis.primary.cause.id
                self._notes.append(f"Neither a plan nor a known change of the source fixes {what}.")
                return self._finish(diagnosis)
            self._say_how_long(len(ways))
            self._look_at_seeds()
            return self._finish(diagnosis, *self._try(ways))

    def _diagnose(self) -> Diagnosis:
        given = self._given
        known: dict[str, Any] | None = self._kept.get("diagnose", seconds=(int, float), diagnosis=dict, patch=dict)
        if known is None:
            began = time.monotonic()
            words = [word.replace(_SEED, str(given.seed)) for word in given.words]
            made = diagnose_script(
                words,
                keep_stdout=True,
                as_device=given.device or None,
                tries_fixes=True,
                is_last=False,
                on_progress=self._say,
                on_start=self._say_start,
            )
            if made.primary is None and made.no_verdict:
                raise RescueError(f"Nothing can be said about the script: {made.no_verdict}.")
            patch = {} if made.primary is None else plain_patch(made)
            known = {
                "seconds": time.monotonic() - began, "diagnosis": plain_diagnosis(made), "patch": patch,
                "num_steps": made.num_steps, "start_seconds": made.start_seconds,
            }  # fmt: skip
            self._kept.put("diagnose", known)
        diagnosis = replace(read_diagnosis(known["diagnosis"]), num_steps=int(known["num_steps"]))
        diagnosis = read_patch(diagnosis, known["patch"]) if known["patch"] else diagnosis
        self._start_seconds = float(known.get("start_seconds", 0.0))
        primary, text = diagnosis.primary, diagnosis.verdict
        if primary is not None:
            text = f"{primary.cause.id} at {Path(primary.file).name or primary.where}"
        self._end_stage("diagnose", known["seconds"], text)
        return diagnosis

    def _find_ways(self, diagnosis: Diagnosis) -> list[_Way]:
        """The change of the source that held in the diagnosis, then plans, the most exact first."""
        found: list[_Way] = []
        if diagnosis.primary is None:  # a failure that nothing explains: floatline's loop may not have it
            base = resolve_plan(diagnosis.precision) if diagnosis.precision not in ("", "fp32") else None
            does, why = "floatline's own loss scaling and updates", diagnosis.unexplained
            return [] if base is None else [_Way(does, why, with_own_scaling(with_update(base)))]
        primary = diagnosis.findings[0]
        if diagnosis.fixes:
            sources = {str(fix.file.resolve()): fix.after for fix in diagnosis.fixes}
            places = ", ".join(f"{fix.name}:{fix.line}" for fix in diagnosis.fixes)
            found.append(_Way(f"the change of {places}", primary.tried, sources=sources))
        if diagnosis.verdict == "not-precision" or diagnosis.precision in ("", "fp32"):
            return found
        places = [locate(f, None, modules=[f.module]) for f in diagnosis.findings]
        plans = propose(resolve_plan(diagnosis.precision), places, scale=diagnosis.scale)
        return [*found, *(_Way(candidate.does, candidate.why, candidate.plan) for candidate in plans)]

    def _say_how_long(self, num_ways: int) -> None:
        """A script that takes long before its first step does so in every run: say how many follow, and what helps."""
        if self._start_seconds < LONG_START:
            return
        text = (
            f"the script takes {self._start_seconds:.0f} s before its first step, in each of up to {num_ways + 2} "
            f"trials and {2 * SHORT_SEEDS} runs of a validation. Data that is prepared once and kept on the disk saves "
            "most of that; --steps makes every run shorter, --budget ends the trials, and --limit a run of the "
            "validation that takes longer."
        )
        self._say(text)
        self._notes.append(text[0].upper() + text[1:])

    def _look_at_seeds(self) -> None:
        """Say now, and not after all trials, that a validation will have no seeds to tell apart."""
        if self._kept.get("seeds") is not None:
            return
        given = self._given
        arm = ScriptArm(
            "fp32", given.words, resolve_plan("fp32"), given.folder / "runs", device=given.device, shifts=given.shifts
        )
        try:
            check_seeds(arm, given.seed)
        except FloatlineError as error:
            self._say(f"no validation will be made: {error}")
        self._kept.put("seeds", {})

    def _try(self, ways: Sequence[_Way]) -> tuple[_Way | None, Validation | None, Margins | None]:
        """The first way that keeps up with FP32 and passes the validation; else the first that keeps up."""
        fp32 = self._train("training in FP32 for comparison", _Way("fp32", "", resolve_plan("fp32")))
        self._curves["FP32"] = fp32.losses
        if fp32.error or not fp32.losses:
            self._notes.append(f"The script fails in FP32, too: {fp32.error or 'it makes no step'}.")
            return None, None, None
        broken = self._train("training as it is", _Way("nothing changed", "for comparison"))
        self._curves["as it is"] = broken.losses
        self._note(_Way("nothing changed", "for comparison"), broken, fp32)
        if not self._tried[-1].shortfall:
            self._notes.append(
                "With nothing changed it keeps up, too: the finding shows in no loss of so short a run yet."
            )
        deadline, first, validations = time.monotonic() + self._given.budget, None, 0
        left = list(ways)
        while left:
            way = left.pop(0)
            if time.monotonic() > deadline:
                self._notes.append("The budget was used up before all plans were tried.")
                self._complete = False
                break
            kept_up = self._try_out(way, fp32)
            if kept_up is None:
                continue
            self._end_stage("plan", sum(tried.seconds for tried in self._tried), kept_up.does)
            validations += 1
            margins = self._choose_margins(fp32)
            validation = self._verify(kept_up, margins, validations)
            first = first or (kept_up, validation, margins)
            if validation is not None and validation.verdict == "PASS":
                return kept_up, validation, margins
            if validation is None or validation.verdict != "FAIL" or validations == _MOST_VALIDATIONS:
                break
            lower = self._lower(kept_up, validation)
            left = left if lower is None else [lower, *left]
        if first is None:
            self._end_stage("plan", sum(tried.seconds for tried in self._tried), "nothing trains as FP32 does")
        return first or (None, None, None)

    @staticmethod
    def _lower(way: _Way, validation: Validation) -> _Way | None:
        """The same plan with a lower loss scale, where it diverged with seeds with which FP32 did not."""
        pairs = pair_up(validation.runs, candidate=validation.best.candidate)
        num_lost = sum(pair.diverged for pair in pairs)
        if way.plan is None or not num_lost:
            return None
        lower = lower_scale(Candidate(way.plan, way.does, way.why), f"{num_lost} of {len(pairs)}")
        return None if lower is None else _Way(lower.does, lower.why, lower.plan)

    def _choose_margins(self, fp32: Trial) -> Margins:
        """What FP32 learnt is known of the loss alone."""
        prove = self._given.prove
        if self._given.metric != LOSS:
            return usual_margins(prove=prove)
        return settle_margins(_as_pilot(fp32), prove=prove)

    def _try_out(self, way: _Way, fp32: Trial) -> _Way | None:
        """The way if it trains as FP32 does, or the same with another first loss scale; None where neither does."""
        trial = self._train(f"trying {way.does}", way)
        self._note(way, trial, fp32)
        keeps_up = not find_shortfall(trial, fp32)
        if keeps_up:
            self._curves["rescued"] = trial.losses
        if (keeps_up and not searches_long(trial)) or way.plan is None:
            return way if keeps_up else None
        settled = settle_scale(Candidate(way.plan, way.does, way.why), trial)
        if settled is None:
            return way if keeps_up else None
        again = _Way(settled.does, settled.why, settled.plan)
        trial = self._train(f"trying {again.does}", again)
        self._note(again, trial, fp32)
        if find_shortfall(trial, fp32):
            return way if keeps_up else None
        self._curves["rescued"] = trial.losses
        return again

    def _train(self, what: str, way: _Way) -> Trial:
        """A short run, or the one that there is."""
        key = hashlib.sha256(json.dumps([to_plain(way.plan and way.plan.as_given()), way.sources]).encode())
        name = f"trial-{key.hexdigest()[:24]}"
        known = self._kept.get(name)
        if known is None:
            self._say(f"{what}: up to {self._steps} steps")
            arm = ScriptArm(
                name, self._given.words, way.plan, self._given.folder / "runs",
                steps=self._steps, device=self._given.device, shifts=self._given.shifts, sources=way.sources,
            )  # fmt: skip
            try:
                made = run_script(arm.job(self._given.seed))
                trial = Trial(made.losses, made.skipped, made.error, made.seconds, made.scale, made.first_scale)
            except FloatlineError as error:
                trial = Trial((), (), str(error), 0.0)
            known = to_plain(trial)
            self._kept.put(name, known)
        return read_trial(known)

    def _note(self, way: _Way, trial: Trial, fp32: Trial) -> None:
        self._tried.append(Tried(way.does, way.why, find_shortfall(trial, fp32), trial.seconds))

    def _verify(self, way: _Way, margins: Margins, number: int) -> Validation | None:
        given, began = self._given, time.monotonic()
        self._say("validating against FP32")
        folder = given.folder / "stages" / f"{'full' if given.prove else 'short'}-{number}"
        try:
            validation = validate_script(
                given.words, [way.plan], metric=given.metric, higher_is_better=given.higher_is_better,
                scale=margins.scale, margins=margins.values,
                steps=given.steps, seed=given.seed, shifts=given.shifts, sources=way.sources, device=given.device,
                max_seeds=LOOKS[-1] if given.prove else SHORT_SEEDS, folder=folder, timeout=given.timeout,
                resume=(folder / "study.json").is_file(), watcher=Speaker(self._say),
            )  # fmt: skip
        except FloatlineError as error:
            self._notes.append(f"The validation was not made: {error}")
            self._end_stage("validate", time.monotonic() - began, str(error))
            return None
        self._end_stage("validate", time.monotonic() - began, f"{validation.verdict}: {validation.best.reason}")
        return validation

    def _finish(
        self,
        diagnosis: Diagnosis,
        way: _Way | None = None,
        validation: Validation | None = None,
        margins: Margins | None = None,
    ) -> Rescue:
        if margins is not None and margins.note:
            self._notes.append(margins.note)
        if way is not None and self._given.shifts and validation is not None:
            self._notes.append(
                "The command has no {seed}: the seeds that the script takes itself were raised by 0, 1, 2 and so on."
            )
        return Rescue(
            target=self._text,
            diagnosis=diagnosis,
            steps=self._steps,
            plan=None if way is None else way.plan,
            does="" if way is None else way.does,
            by_patch=way is not None and bool(way.sources),
            is_script=True,
            tried=tuple(self._tried),
            validation=validation,
            margin="" if margins is None else margins.words,
            proved=self._given.prove,
            stages=tuple(self._stages),
            notes=tuple(self._notes),
            complete=self._complete,
            code=self._code,
            curves=self._curves,
        )

    def _end_stage(self, name: str, seconds: float, text: str) -> None:
        self._stages.append(Stage(name, round(seconds, 3), text))


def _as_pilot(fp32: Trial) -> ArmRun:
    """FP32's short run as what margins are settled by."""
    begin, end = fp32.way
    return ArmRun("fp32", 0, end, start=begin)


def _say_nothing(_text: str) -> None:
    pass
