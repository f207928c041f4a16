"""Every rule of the verdict, and a near miss that it does not catch."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.validation.studies import arms, run, with_nudged

from floatline.errors import ComparisonError
from floatline.validation.verdict.comparison import Comparison
from floatline.validation.verdict.pairs import pair_up
from floatline.validation.verdict.power import (
    is_futile,
    judge_interval,
    judge_look,
    judge_studies,
    measure_noise,
    plan_seeds,
)
from floatline.validation.verdict.statistics import reach
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.verdict import decide, next_look

TERMS = Terms()
CANDIDATE = "fp16-mixed"


def verdict_of(runs, terms=TERMS):
    return decide(runs, candidate=CANDIDATE, terms=terms)


def look_again(runs, terms=TERMS):
    return next_look(runs, candidate=CANDIDATE, terms=terms)


@pytest.mark.parametrize(
    ("low", "high", "last", "verdict"),
    [
        (-0.01, 0.01, False, "PASS"),
        (-0.01, 0.0101, False, "INCONCLUSIVE"),
        (0.02, 0.05, False, "FAIL"),
        (0.0199, 0.05, False, "INCONCLUSIVE"),
        (0.0101, 0.02, False, "MARGINAL"),
        (0.01, 0.02, False, "INCONCLUSIVE"),
        (0.0, 0.02, True, "MARGINAL"),
        (0.0, 0.0201, True, "INCONCLUSIVE"),
        (-0.05, -0.03, False, "PASS"),
    ],
)
def test_the_interval_against_the_margins(low, high, last, verdict):
    assert judge_interval(low, high, terms=TERMS, last=last) == verdict


def test_equal_arms_pass_at_the_first_look():
    result = verdict_of(arms([0.001, -0.001, 0.0005]))
    assert result.verdict == "PASS"
    assert result.seeds == (0, 1, 2)
    assert result.interval == (result.looks[0].low, result.looks[0].high)
    sd, wider = np.std(result.excesses, ddof=1), reach(3.42, 3, np.float64(result.looks[0].skew))
    assert result.looks[0].high == pytest.approx(result.difference + wider * sd)
    assert wider > 3.42
    assert look_again(arms([0.001, -0.001, 0.0005])) is None


def test_a_candidate_that_is_worse_fails_at_the_first_look():
    result = verdict_of(arms([0.05, 0.052, 0.049]))
    assert result.verdict == "FAIL"
    assert "2.00 % worse or more" in result.reason


def test_between_the_margins_is_marginal():
    assert verdict_of(arms([0.014, 0.015, 0.0145])).verdict == "MARGINAL"


def test_an_undecided_look_asks_for_the_next_one():
    runs = arms([0.012, -0.008, 0.004])
    assert verdict_of(runs).verdict == "INCONCLUSIVE"
    assert look_again(runs) == 5


def test_no_look_is_left_after_the_last():
    runs = arms([0.012, -0.002, 0.004], candidate=CANDIDATE)
    terms = Terms(looks=(2, 3))
    assert verdict_of(runs, terms).verdict == "INCONCLUSIVE"
    assert look_again(runs, terms) is None


def test_seeds_beyond_the_deciding_look_change_nothing():
    runs = arms([0.001, -0.001, 0.0005, 0.9, 0.9])
    result = verdict_of(runs)
    assert result.verdict == "PASS"
    assert result.seeds == (0, 1, 2)
    assert any("seeds 3, 4 are beyond" in note for note in result.notes)


def test_a_wide_spread_ends_it_from_five_seeds_on():
    wide = [0.06, -0.05, 0.055, -0.06, 0.05]
    assert look_again(arms(wide[:3])) == 5
    assert look_again(arms(wide)) is None
    assert "too wide" in verdict_of(arms(wide)).reason
    assert look_again(arms([0.4 * value for value in wide])) == 8


def test_futility_is_measured_against_twice_the_margin():
    excesses = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    excesses = excesses / excesses.std(ddof=1)
    assert is_futile(judge_look(excesses * 0.0371, terms=TERMS), terms=TERMS)
    assert not is_futile(judge_look(excesses * 0.0370, terms=TERMS), terms=TERMS)


def test_fewer_seeds_than_the_smallest_look_are_refused_and_asked_for():
    runs = arms([0.0, 0.001])
    result = verdict_of(runs)
    assert result.verdict == "REFUSED"
    assert [gate.name for gate in result.failed_gates] == ["enough-seeds"]
    assert (result.difference, result.interval) == (None, None)
    assert look_again(runs) == 3


def test_four_seeds_are_judged_at_three():
    result = verdict_of(arms([0.012, -0.008, 0.004, 0.001]))
    assert result.seeds == (0, 1, 2)
    assert look_again(arms([0.012, -0.008, 0.004, 0.001])) == 5


def test_a_diverged_candidate_fails_at_once():
    runs = [run("fp32", 0, 2.0), run(CANDIDATE, 0, math.nan)]
    result = verdict_of(runs)
    assert result.verdict == "FAIL"
    assert result.excesses == (math.inf,)
    assert look_again(runs) is None


def test_one_diverged_seed_among_good_ones_fails():
    runs = arms([0.0, 0.0001, 0.0002, 0.0])
    runs[-1] = replace(runs[-1], diverged=True)
    result = verdict_of(runs)
    assert result.verdict == "FAIL"
    assert "1 of 4 seeds (seed 3)" in result.reason


def test_a_diverged_candidate_fails_though_the_reference_hardly_learned():
    runs = [run("fp32", 0, 3.9), run(CANDIDATE, 0, math.inf)]
    assert verdict_of(runs).verdict == "FAIL"


def test_a_candidate_that_gave_up_without_a_step_fails():
    runs = [run("fp32", 0, 2.0), run(CANDIDATE, 0, math.nan, applied=0, skipped=40, diverged=True)]
    assert verdict_of(runs).verdict == "FAIL"


def test_divergence_of_both_arms_is_refused():
    runs = [run("fp32", 0, math.nan), run(CANDIDATE, 0, math.nan)]
    assert verdict_of(runs).verdict == "REFUSED"
    assert verdict_of(runs).failed_gates[0].name == "reference-finite"


def test_divergence_with_a_different_start_is_refused():
    runs = [run("fp32", 0, 2.0), run(CANDIDATE, 0, math.nan, first_losses=(9.0,) * 20)]
    assert verdict_of(runs).failed_gates[0].name == "same-start"
    assert verdict_of(runs).verdict == "REFUSED"


def test_a_share_that_fell_to_zero_fails():
    terms = Terms(metric="hmean", higher_is_better=True)
    runs = [run(arm, seed, value, start=0.01) for seed in range(3) for arm, value in (("fp32", 0.8), (CANDIDATE, 0.0))]
    result = verdict_of(runs, terms)
    assert result.verdict == "FAIL"
    assert "lost all of its hmean" in result.reason
    zeros = [replace(r, metric=0.0) for r in runs]
    assert verdict_of(zeros, terms).verdict == "REFUSED"


def test_much_better_is_a_pass_with_a_flag():
    result = verdict_of(arms([-0.05, -0.051, -0.049]))
    assert result.verdict == "PASS"
    assert any("suspiciously better" in flag for flag in result.flags)
    assert not any("suspicious" in flag for flag in verdict_of(arms([-0.001, 0.001, 0.0])).flags)


def test_a_pass_names_its_horizon():
    assert "a PASS holds to the tested horizon of 1,000 steps" in verdict_of(arms([0.001, 0.0, -0.001])).flags
    assert verdict_of(arms([0.05, 0.052, 0.049])).flags == ()


def test_a_language_model_is_told_what_a_percent_is_worth():
    def notes(terms):
        return " ".join(verdict_of(arms([0.001, 0.0, -0.001]), terms).notes)

    assert "20 % of the compute" in notes(Terms(language_model=True))
    assert "20 % of the compute" not in notes(Terms(language_model=True, margins=(0.0025, 0.005)))
    assert "20 % of the compute" not in notes(TERMS)


def test_a_metric_near_one_is_told_what_the_margin_is_of_its_errors():
    ends = [("fp32", 0.98), (CANDIDATE, 0.978)]
    runs = [run(a, s, m + s * s * 1e-6, start=0.1) for s in range(3) for a, m in ends]
    accuracy = Terms(metric="accuracy", higher_is_better=True)
    assert any("49 % of the errors" in note for note in verdict_of(runs, accuracy).notes)
    assert verdict_of(runs, accuracy).verdict == "PASS"
    assert verdict_of(runs, replace(accuracy, scale="log-error")).verdict == "FAIL"


def test_a_negative_metric_is_refused_and_compared_by_its_difference():
    terms = Terms(metric="reward", higher_is_better=False)
    runs = [run(a, s, -5.0 + 0.01 * s + d) for s in range(3) for a, d in (("fp32", 0.0), (CANDIDATE, 0.001 * s))]
    refused = verdict_of(runs, terms)
    assert refused.verdict == "REFUSED"
    assert "difference" in refused.failed_gates[0].advice
    assert verdict_of(runs, replace(terms, scale="difference", margins=(0.1, 0.2))).verdict == "PASS"


def test_a_metric_without_any_spread_decides_nothing_unless_its_steps_are_known():
    runs = [run(a, s, 2.0) for s in range(3) for a in ("fp32", CANDIDATE)]
    assert (verdict_of(runs).verdict, look_again(runs)) == ("INCONCLUSIVE", 5)
    assert "too coarse" in verdict_of(runs).reason
    assert verdict_of(runs, replace(TERMS, resolution=0.001)).verdict == "PASS"
    assert verdict_of(runs, replace(TERMS, resolution=0.02)).verdict == "INCONCLUSIVE"  # a step is 1 % itself


def test_identical_arms_are_refused():
    runs = [r for s in range(3) for r in (run("fp32", s, 2.0), replace(run("fp32", s, 2.0), arm=CANDIDATE))]
    assert verdict_of(runs).failed_gates[0].name == "arms-differ"
    assert look_again(runs[:2]) is None


def test_a_seed_missing_in_one_arm_is_not_used_and_named():
    runs = arms([0.001, -0.001, 0.0005, 0.0])[:-1]
    result = verdict_of(runs)
    assert result.seeds == (0, 1, 2)
    assert any("seed 3 is in one arm only" in note for note in result.notes)


def test_an_arm_without_runs_is_an_error():
    with pytest.raises(ComparisonError, match="No run of arm 'bf16'"):
        decide(arms([0.0]), candidate="bf16", terms=TERMS)


def test_a_wide_noise_floor_holds_a_pass_back_until_no_look_is_left():
    good = [0.001, -0.001, 0.0005, 0.0, 0.0002]
    noisy = with_nudged(arms(good[:3]), [0.008, -0.008, 0.0])
    assert verdict_of(noisy).failed_gates[0].name == "noise-floor"
    assert verdict_of(noisy).verdict == "REFUSED"
    assert look_again(noisy) == 5
    quiet = with_nudged(arms(good), [0.004, -0.004, 0.0, 0.001, -0.001])
    assert verdict_of(quiet).verdict == "PASS"
    assert verdict_of(quiet).looks[-1].num_seeds == 5
    last = Terms(looks=(3,))
    assert look_again(noisy, last) is None


def test_a_wide_noise_floor_does_not_hold_a_fail_back():
    noisy = with_nudged(arms([0.05, 0.052, 0.049]), [0.008, -0.008, 0.0])
    assert verdict_of(noisy).verdict == "FAIL"


def test_the_noise_floor_is_a_one_sided_interval_of_these_seeds():
    pairs = pair_up(with_nudged(arms([0, 0, 0]), [0.001, -0.001, 0.0]), candidate="fp32-nudged")
    noise = measure_noise(pairs, terms=TERMS)
    assert noise.half_width == pytest.approx(2.92 / math.sqrt(3) * 0.001, rel=1e-3)
    assert measure_noise(pairs[:1], terms=TERMS) is None


def test_a_broken_candidate_that_passes_refuses_everything():
    runs = arms([0.001, -0.001, 0.0005])
    for broken, verdict in ((0.0, "REFUSED"), (0.5, "PASS"), (math.nan, "PASS")):
        arm = [run("broken", r.seed, r.metric * (1 + broken + 1e-4 * r.seed)) for r in runs if r.arm == "fp32"]
        assert verdict_of(runs + arm).verdict == verdict


def test_a_broken_candidate_that_raised_or_has_too_few_seeds_is_not_counted():
    runs = arms([0.001, -0.001, 0.0005])
    raised = [run("broken", r.seed, math.nan, error="RuntimeError: boom") for r in runs if r.arm == "fp32"]
    few = [run("broken", 0, 9.0)]
    for broken in (raised, few):
        gate = next(g for g in verdict_of(runs + broken).gates if g.name == "broken-fails")
        assert gate.passed is None


def test_unrecorded_gates_are_named():
    bare = [replace(r, start=None, steps=None, applied=None, skipped=None) for r in arms([0.001, 0.0, -0.001])]
    result = verdict_of(bare)
    assert result.verdict == "PASS"
    unchecked = next(flag for flag in result.flags if flag.startswith("not checked"))
    assert "steps-taken" in unchecked
    assert "reference-learned" in unchecked


def test_a_comparison_comes_back_from_json():
    runs = with_nudged(arms([0.001, -0.001, 0.0005], curve=()), [0.001, -0.001, 0.0])
    result = decide(runs, candidate=CANDIDATE, terms=TERMS, plan=plan_seeds(0.005, terms=TERMS, num_studies=50))
    data = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert Comparison.from_json(data) == result
    assert {"verdict", "metric", "difference", "interval", "margin", "seeds", "gates"} <= set(data)
    with pytest.raises(ComparisonError, match="verdict"):
        Comparison.from_json(data | {"verdict": "GOOD"})


def test_the_text_says_verdict_interval_and_margins():
    text = str(verdict_of(arms([0.001, -0.001, 0.0005])))
    assert text.startswith("fp16-mixed vs fp32 on loss: PASS")
    assert "margins    1.00 % and 2.00 %, 3 paired seeds" in text
    assert "but: a PASS holds" in text


def test_the_text_of_a_refusal_names_gate_and_way_out_and_that_of_a_fail_does_not():
    assert "gate enough-seeds: 2 of 3 seeds" in str(verdict_of(arms([0.0, 0.001])))
    assert "gate" not in str(verdict_of([run("fp32", 0, 2.0), run(CANDIDATE, 0, math.nan)]))


def test_the_text_of_a_higher_is_better_metric_says_which_side_is_worse():
    runs = [run(a, s, m + s / 100, start=0.1) for s in range(3) for a, m in (("fp32", 0.8), (CANDIDATE, 0.7))]
    assert "difference 13.18 % worse" in str(verdict_of(runs, Terms(metric="hmean", higher_is_better=True)))
    assert "difference 0.02 % worse" in str(verdict_of(arms([0.001, -0.001, 0.0005])))
    assert "difference 0.02 % better" in str(verdict_of(arms([-0.001, 0.001, -0.0005])))


def test_many_studies_at_once_end_as_one_by_one():
    terms = Terms(looks=(3, 5, 8))
    rng = np.random.default_rng(1)
    excesses = rng.normal(0.007, 0.008, (60, 8)) + rng.choice([0, 0.02], (60, 1)) + rng.choice([0, 0.006], (60, 1))
    excesses[::7] *= 4  # some are wide enough for the futility stop
    studies = judge_studies(excesses, terms)
    seen = set()
    for row, excess in enumerate(excesses):
        # ln(1 + e) is not e: give the metric whose excess is exactly the row's.
        result = decide(arms(np.expm1(excess)), candidate=CANDIDATE, terms=terms)
        flags = {"PASS": studies.passed, "FAIL": studies.failed, "MARGINAL": studies.marginal}
        flags["INCONCLUSIVE"] = ~(studies.passed | studies.failed | studies.marginal)
        assert flags[result.verdict][row], (row, result)
        assert result.looks[-1].num_seeds == studies.num_seeds[row]
        seen.add(result.verdict)
    assert seen == {"PASS", "FAIL", "MARGINAL", "INCONCLUSIVE"}
