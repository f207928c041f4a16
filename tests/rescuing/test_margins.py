"""Margins of a rescue's validation: of the metric, and of what FP32 learnt where the metric goes to zero."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tests.report.validation.validations import make_validation
from tests.slow import slow

from floatline.plans import KeptModule
from floatline.plans.presets import resolve_plan
from floatline.rescuing import verification
from floatline.rescuing.short_run import Trial
from floatline.rescuing.verification import SHORT, needs_pilot, run_pilot, settle_margins, usual_margins, verify
from floatline.validation.verdict.pairs import ArmRun
from floatline.validation.verdict.terms import MARGINS
from floatline.validation.verdict.verdict import decide
from floatline.workload import load_target

TARGETS = Path(__file__).parent / "targets.py"


def fp32(start, end, error=""):
    return ArmRun("fp32", 0, end, start=start, error=error)


@pytest.mark.parametrize(("prove", "values"), [(False, SHORT), (True, MARGINS)])
def test_a_loss_that_stays_away_from_zero_has_margins_of_itself(prove, values):
    margins = settle_margins(fp32(4.0, 2.0), prove=prove)
    assert margins == usual_margins(prove=prove)
    assert (margins.scale, margins.values, margins.note) == ("log", values, "")


def test_a_loss_that_goes_to_zero_has_margins_of_what_was_learnt_and_says_so():
    margins = settle_margins(fp32(2.0, 1e-4), prove=False)
    assert margins.scale == "difference"
    assert margins.values == pytest.approx((0.01 * 1.9999, 0.02 * 1.9999))
    assert margins.words == "1 % of what FP32 learnt" and "from 2 to 0.0001" in margins.note
    assert settle_margins(fp32(2.0, 1e-4), prove=True).values == pytest.approx((0.002 * 1.9999, 0.004 * 1.9999))


def test_the_two_margins_meet_where_fp32_ends_at_a_sixth_of_its_start():
    above, below = (settle_margins(fp32(6.0, end), prove=False) for end in (1.001, 0.999))
    assert (above.scale, below.scale) == ("log", "difference")
    assert below.values[0] == pytest.approx(above.values[0] * 1.0, rel=0.01)


def test_a_loss_below_zero_has_no_logarithm_and_gets_margins_of_what_was_learnt():
    assert settle_margins(fp32(3.0, -2.0), prove=False).values == pytest.approx((0.05, 0.1))


@pytest.mark.parametrize(
    "pilot", [fp32(None, 0.1), fp32(1.0, math.nan), fp32(0.5, 0.9), fp32(2.0, 1e-9, error="RuntimeError: no")]
)
def test_a_pilot_that_says_nothing_leaves_the_margins_to_the_gates(pilot):
    assert settle_margins(pilot, prove=False) == usual_margins(prove=False)


def test_a_pilot_is_run_where_the_short_run_leaves_it_open():
    kept, fell = (Trial((4.0,) * 20 + (end,) * 20, (), "", 0.0) for end in (3.0, 0.1))
    assert not needs_pilot(kept, steps=40)
    assert needs_pilot(fell, steps=40)
    assert needs_pilot(kept, steps=None)  # the validation is longer than the short run
    assert needs_pilot(Trial((), (), "no", 0.0), steps=40)


@slow
def test_a_plan_on_a_loss_that_goes_to_zero_is_verified_where_shares_of_it_decide_nothing(tmp_path):
    target = load_target(f"{TARGETS}:vanishing")
    kept = (KeptModule(pattern="energy", reason="x"),)
    plan = resolve_plan("fp16-mixed").model_copy(update={"name": "rescued", "fp32_modules": kept})
    pilot = run_pilot(target, plan, steps=100, seed=0)
    assert pilot is not None and pilot.metric < 0.01 * pilot.start
    margins = settle_margins(pilot, prove=False)
    said = []
    validation = verify(target, plan, margins, steps=100, seed=0, prove=False, folder=tmp_path, say=said.append)
    assert validation.verdict == "PASS" and validation.target == target.text
    assert len(said) == 9 and "seed 0 is done; 8 runs to the next look, about " in said[0]
    usual = replace(validation.best.terms, scale="log", margins=SHORT)
    assert decide(validation.runs, candidate="rescued", terms=usual).verdict in ("REFUSED", "INCONCLUSIVE")
    # The gates are the same: what lags by more than a hundredth of what was learnt does not pass.
    worse = [replace(r, metric=r.metric + 2 * margins.values[1]) if r.arm == "rescued" else r for r in validation.runs]
    assert decide(worse, candidate="rescued", terms=validation.best.terms).verdict == "FAIL"


@pytest.mark.parametrize("prove", [False, True])
def test_the_short_form_is_short_and_the_proof_is_validate_s_own(prove, monkeypatch, tmp_path):
    asked = {}

    def validate(target, plans, **options):
        asked.update(options, target=target, plans=plans)
        return make_validation()

    monkeypatch.setattr(verification, "validate", validate)
    target, plan = load_target(f"{TARGETS}:island"), resolve_plan("fp16-mixed")
    said = verify(
        target, plan, usual_margins(prove=prove), steps=9, seed=4, prove=prove, folder=tmp_path, say=lambda _: None
    )
    assert (asked["margins"], asked["steps"], asked["seed"]) == (MARGINS if prove else SHORT, 9, 4)
    short = {"max_seeds": 8, "broken": False, "measure": False}
    assert {name: asked.get(name) for name in short} == (dict.fromkeys(short) if prove else short)
    assert (asked["target"] == target.text) == prove  # in processes of their own
    assert said.reproduce.endswith("--seed 4 --steps 9 --prove") == prove
