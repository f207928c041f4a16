"""Short runs of candidates: none is made twice, and a plan may begin at the loss scale that its search ended at."""

import pytest

from floatline.plans import KeptModule, Scaling
from floatline.plans.presets import resolve_plan
from floatline.rescuing import trials as module
from floatline.rescuing.candidates import Candidate
from floatline.rescuing.finished_stages import Kept
from floatline.rescuing.short_run import Trial
from floatline.rescuing.trials import UNCLIPPED, Trials, lower_scale, searches_long, settle_scale

BASE = resolve_plan("fp16-mixed")
PLAN = BASE.model_copy(update={"name": "rescued", "fp32_modules": (KeptModule(pattern="a", reason="x"),)})
GOOD = Trial(tuple(1.0 - 0.02 * i for i in range(40)), (), "", 1.0)
LAGS = Trial((1.0,) * 40, (3,), "", 1.0, 32768.0)
ASKED = {"target": "net.py"}


@pytest.fixture
def ran(monkeypatch):
    """Answers every run by `rule`, and lists the plans that were run."""
    plans = []

    def use(rule):
        def run(_target, plan, *, steps, seed):
            plans.append(plan)
            return rule(plan)

        monkeypatch.setattr(module, "run_trial", run)
        return plans

    return use


def begin(folder):
    kept = Kept(folder, asked=ASKED, prove=False)
    trials = Trials(None, kept, steps=40, seed=0, say=lambda _: None)
    return kept, trials, trials.prepare(BASE, [Candidate(PLAN, "a in FP32", "why")])[0]


def first_lags(plan):
    skips = plan.fp32_modules and plan.scaling.init_scale > 32768.0
    return LAGS if skips or (plan.compute == "fp16" and not plan.fp32_modules) else GOOD


def test_a_plan_that_lags_for_the_search_of_a_scale_begins_at_the_scale_it_found(ran, tmp_path):
    ran(first_lags)
    _, trials, candidate = begin(tmp_path)
    chosen = trials.try_out(candidate)
    assert chosen.plan.scaling == Scaling(init_scale=32768.0) and chosen.plan.fp32_modules == PLAN.fp32_modules
    assert "1 of 40 steps" in chosen.plan.reasons["scaling"]
    assert [bool(tried.shortfall) for tried in trials.tried] == [True, True, False]
    assert chosen.does.endswith("a loss scale that starts at 32768")


@pytest.mark.parametrize(("skipped", "settles"), [((0, 1), True), ((0,), False)])
def test_a_plan_that_keeps_up_but_skips_what_a_validation_refuses_begins_at_its_scale(ran, tmp_path, skipped, settles):
    searches = Trial(GOOD.losses, skipped, "", 1.0, 16384.0)
    ran(lambda plan: searches if plan.fp32_modules and plan.scaling.init_scale > 16384.0 else GOOD)
    _, trials, candidate = begin(tmp_path)
    assert (trials.try_out(candidate).plan.scaling.init_scale == 16384.0) == settles


def test_a_plan_that_keeps_up_is_taken_where_its_scale_does_not_help(ran, tmp_path):
    searches = Trial(GOOD.losses, (0, 1), "", 1.0, 16384.0)
    ran(lambda plan: (searches if plan.scaling.init_scale > 16384.0 else LAGS) if plan.fp32_modules else GOOD)
    _, trials, candidate = begin(tmp_path)
    assert trials.try_out(candidate) is candidate


@pytest.mark.parametrize(
    "trial",
    [
        Trial((1.0,) * 40, (), "", 1.0, 65536.0),  # nothing was skipped: the scale is not it
        Trial((1.0,) * 40, (3,), "weights are not finite", 1.0, 32768.0),
    ],
)
def test_a_plan_that_lags_for_another_reason_is_given_up_at_once(ran, tmp_path, trial):
    plans = ran(lambda plan: trial if plan.fp32_modules else GOOD)
    _, trials, candidate = begin(tmp_path)
    assert trials.try_out(candidate) is None
    assert sum(bool(plan.fp32_modules) for plan in plans) == 1


def test_no_run_is_made_twice_not_even_by_the_next_rescue(ran, tmp_path):
    plans = ran(first_lags)
    kept, trials, candidate = begin(tmp_path)
    trials.try_out(candidate)
    number, seconds = len(plans), trials.take_seconds()
    kept.close()
    _, again, candidate = begin(tmp_path)
    assert again.try_out(candidate).plan.scaling.init_scale == 32768.0
    assert len(plans) == number and again.take_seconds() == seconds == number
    assert again.tried == trials.tried


def test_where_clipping_hurts_fp32_no_plan_clips(ran, tmp_path):
    ran(lambda plan: LAGS if plan.compute == "fp32" and plan.clip is None else GOOD)
    _, trials, candidate = begin(tmp_path)
    assert candidate.plan.clip == UNCLIPPED and "does not clip" in trials.notes[0]


@pytest.mark.parametrize(("began", "settles"), [(None, True), (2.0**20, True), (2.0**15, False), (1024.0, False)])
def test_a_scale_is_settled_where_it_fell_from_where_the_run_began(began, settles):
    trial = Trial((1.0,) * 40, (3,), "", 1.0, 2.0**15, began)
    found = settle_scale(Candidate(PLAN, "a in FP32", "why"), trial)
    assert (found is not None and found.plan.scaling.init_scale == 2.0**15) == settles


def test_a_plan_that_diverged_gets_a_lower_scale_that_stays():
    plan = PLAN.model_copy(update={"scaling": Scaling(init_scale=2.0**16)})
    lower = lower_scale(Candidate(plan, "x", "why"), "1 of 3")
    assert lower.plan.scaling == Scaling(init_scale=2.0**12, cap=2.0**12)
    assert lower.does == "a loss scale of 4096 that does not grow"
    assert "1 of 3 seeds" in lower.plan.reasons["scaling"] and "65536" in lower.why
    small = plan.model_copy(update={"scaling": Scaling(init_scale=8.0)})
    assert lower_scale(Candidate(small, "x", "why"), "1 of 3") is None
    assert lower_scale(Candidate(plan.model_copy(update={"scaling": None}), "x", "why"), "1 of 3") is None


@pytest.mark.parametrize(("skipped", "is_long"), [((0, 1), True), ((0,), False), ((), False)])
def test_a_search_is_long_where_it_skips_more_than_half_of_what_a_validation_bears(skipped, is_long):
    assert searches_long(Trial(GOOD.losses, skipped, "", 1.0)) == is_long
