"""Trials: candidate plans trained for a short run each, against FP32; those that were run before are not run again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from floatline.base.plain_records import to_plain
from floatline.plans import Clip, Plan
from floatline.plans.presets import resolve_plan
from floatline.rescuing.candidates import Candidate, with_update
from floatline.rescuing.finished_stages import Kept, read_trial
from floatline.rescuing.result import Tried
from floatline.rescuing.short_run import Trial, find_shortfall, run_trial
from floatline.validation.verdict.gates import MOST_SKIPPED
from floatline.workload import Target

# A bound that no gradient meets: a guard clips to 1 where a plan says nothing.
UNCLIPPED = Clip(max_norm=1e30)
# A validation as long as the short run is refused where an arm skips more, and its other seeds may skip twice as often.
_SKIPS_TO_SETTLE = MOST_SKIPPED / 2
# Binary orders below the scale at which a run was lost.
_ROOM = 4


class Trials:
    """Short runs of one target.

    Args:
        target: A target with build().
        kept: Where finished runs are.
        steps: Of every run.
        seed: Of every run.
        say: Told what is done next.

    Attributes:
        tried: Every plan that was tried, in order.
        notes: What is to be said about them.
    """

    def __init__(self, target: Target, kept: Kept, *, steps: int, seed: int, say: Callable[[str], None]) -> None:
        self.tried: list[Tried] = []
        self.notes: list[str] = []
        self._target, self._kept, self._steps, self._seed, self._say = target, kept, steps, seed, say
        self._known: dict[str, Any] = kept.get("trials") or {}
        self._seconds = 0.0
        self._fp32: Trial | None = None
        self._losses: dict[str, tuple[float, ...]] = {}

    @property
    def fp32(self) -> Trial:
        """FP32, which the others are held against."""
        if self._fp32 is None:
            raise AssertionError  # `prepare` is called first
        return self._fp32

    def curves_of(self, chosen: Candidate | None) -> dict[str, tuple[float, ...]]:
        """Losses of FP32, of the run with nothing changed, and of the plan that was chosen, as far as there are any."""
        if chosen is None or self._fp32 is None:
            return {}
        curves = {"FP32": self._fp32.losses}
        for does, losses in self._losses.items():
            if does == chosen.does or does.startswith("nothing "):
                curves["rescued" if does == chosen.does else "as it is"] = losses
        return curves

    def take_seconds(self) -> float:
        """How long the runs took since this was asked last, those of an earlier rescue among them."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def prepare(self, base: Plan, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Train in FP32 and with nothing changed, and give the candidates with the clipping that FP32 bears.

        Args:
            base: The workload's own plan.
            candidates: At least one.
        """
        self._fp32, clip = self._train_fp32(candidates[0].plan)
        candidates = tuple(replace(c, plan=_with_clip(c.plan, clip)) for c in candidates)
        self._compare(_with_clip(with_update(base), clip), first=candidates[0].plan)
        return candidates

    def try_out(self, candidate: Candidate) -> Candidate | None:
        """The candidate if it trains as FP32 does, or the same with another first loss scale; None where neither does.

        A search for the scale skips batches at the very start. Where a short run suffers from that, or a validation
        would be refused for it, the plan can begin at the scale at which the search ended.
        """
        trial = self._try(candidate)
        keeps_up = not find_shortfall(trial, self.fp32)
        if keeps_up and not searches_long(trial):
            return candidate
        settled = None if trial.error else settle_scale(candidate, trial)
        if settled is not None and not find_shortfall(self._try(settled), self.fp32):
            return settled
        return candidate if keeps_up else None

    def _try(self, candidate: Candidate) -> Trial:
        trial = self._run(f"trying {candidate.does}", candidate.plan)
        self._note(candidate.does, candidate.why, trial)
        return trial

    def _note(self, does: str, why: str, trial: Trial) -> None:
        self._losses[does] = trial.losses
        self.tried.append(Tried(does, why, find_shortfall(trial, self.fp32), trial.seconds))

    def _run(self, what: str, plan: Plan) -> Trial:
        """A run under a plan, or the one that there is."""
        key = hashlib.sha256(json.dumps(plan.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:24]
        if key in self._known:
            trial = read_trial(self._known[key])
        else:
            self._say(what)
            trial = run_trial(self._target, plan, steps=self._steps, seed=self._seed)
            self._known[key] = to_plain(trial)
            self._kept.put("trials", self._known)
        self._seconds += trial.seconds
        return trial

    def _train_fp32(self, plan: Plan) -> tuple[Trial, Clip | None]:
        """FP32 for comparison, clipped as the plan says; and the plan's own clip, or none where the guard's hurts."""
        fp32 = resolve_plan("fp32").model_copy(update={"clip": plan.clip, "accumulate": plan.accumulate})
        clipped = self._run("training in FP32 for comparison", fp32)
        if plan.clip is not None:
            return clipped, plan.clip
        free = self._run("training in FP32 without clipping", fp32.model_copy(update={"clip": UNCLIPPED}))
        if free.error or not find_shortfall(clipped, free):
            return clipped, None
        self.notes.append("FP32 itself trains worse with gradients clipped to 1, so the plan does not clip.")
        return free, UNCLIPPED

    def _compare(self, plan: Plan, *, first: Plan) -> None:
        """Train without a remedy: what a plan fixes must be seen to fail without it."""
        words = {"name", "reasons", "scaling"}
        if plan.model_dump(exclude=words) == first.model_dump(exclude=words):
            return
        given = self._run("training with nothing changed", plan)
        does = "nothing changed" if plan.weights == "fp32" else f"nothing but {plan.update} updates"
        self._note(does, "for comparison", given)
        if not find_shortfall(given, self.fp32):
            self.notes.append(f"With {does} it keeps up, too, in so short a run: what was found shows in no loss yet.")


def searches_long(trial: Trial) -> bool:
    """Whether the search for a loss scale skipped so many steps that a validation may show, or refuse, it."""
    return len(trial.skipped) > _SKIPS_TO_SETTLE * len(trial.losses)


def settle_scale(candidate: Candidate, trial: Trial) -> Candidate | None:
    """The candidate with the loss scale that its run ended at; None where that is no other one."""
    scaling = candidate.plan.scaling
    if scaling is None or not trial.skipped:
        return None
    began = scaling.init_scale if trial.first_scale is None else trial.first_scale
    if not scaling.floor <= trial.scale < began:
        return None
    num = len(trial.losses)
    why = f"the search for a loss scale took {len(trial.skipped)} of {num} steps, and ended at it"
    plan = candidate.plan.model_copy(
        update={
            "scaling": scaling.model_copy(update={"init_scale": trial.scale}),
            "reasons": {**candidate.plan.reasons, "scaling": why},
        }
    )
    return Candidate(plan, f"{candidate.does}, a loss scale that starts at {trial.scale:g}", why)


def lower_scale(candidate: Candidate, seeds: str) -> Candidate | None:
    """The candidate with a lower loss scale that never grows; None where there is none to lower.

    A step that overflows is left out. What the script itself does with its gradients is not: one that writes them to
    weights, as sharpness-aware training does, has lost these with the first overflow.
    """
    scaling = candidate.plan.scaling
    if scaling is None or scaling.init_scale * 2.0**-_ROOM < 1.0:
        return None
    scale = scaling.init_scale * 2.0**-_ROOM
    why = f"with a scale that starts at {scaling.init_scale:g} it diverged in {seeds} seeds"
    lower = scaling.model_copy(update={"init_scale": scale, "cap": scale, "floor": min(scaling.floor, scale)})
    plan = candidate.plan.model_copy(update={"scaling": lower, "reasons": {**candidate.plan.reasons, "scaling": why}})
    return Candidate(plan, f"a loss scale of {scale:g} that does not grow", why)


def _with_clip(plan: Plan, clip: Clip | None) -> Plan:
    if clip == plan.clip:
        return plan
    reasons = {**plan.reasons, "clip": "FP32 itself trains worse with the guard's own clipping to a norm of 1."}
    return plan.model_copy(update={"clip": clip, "reasons": reasons})
