"""Every gate closes, says what to do, opens in its twin, and admits that it was not checked."""

import math
from dataclasses import replace

import pytest
from tests.validation.studies import arms, run

from floatline.validation.verdict import gates
from floatline.validation.verdict.comparison import NoiseFloor
from floatline.validation.verdict.pairs import pair_up
from floatline.validation.verdict.terms import Terms

TERMS = Terms()
SHARE = Terms(metric="hmean", higher_is_better=True)


def paired(*, reference=None, candidate=None, excesses=(0.001, -0.001, 0.0005)):
    """Three good pairs, with changes in the last seed of an arm."""
    runs = arms(excesses)
    runs[-2] = replace(runs[-2], **(reference or {}))
    runs[-1] = replace(runs[-1], **(candidate or {}))
    return pair_up(runs, candidate="fp16-mixed")


def test_good_pairs_pass_every_gate():
    for gate in (*gates.setup_gates(paired(), TERMS), *gates.evidence_gates(paired(), TERMS)):
        assert gate.passed is True, gate
        assert gate.advice == ""


@pytest.mark.parametrize(
    ("name", "reference", "candidate"),
    [
        ("completed", {"error": "RuntimeError: out of memory"}, {}),
        ("completed", {}, {"error": "RuntimeError: expected Half"}),
        ("steps-taken", {"applied": 0, "steps": 0}, {}),
        ("steps-taken", {}, {"applied": None, "steps": 0}),
        ("weights-changed", {"weights_changed": False}, {}),
        ("weights-changed", {}, {"weights_changed": False}),
        ("reference-finite", {"metric": math.nan}, {}),
        ("reference-finite", {"diverged": True}, {}),
        ("same-start", {}, {"first_losses": (4.1,) * 20}),
        ("arms-differ", {"first_losses": (4.0,) * 20}, {"first_losses": (4.0,) * 20}),
        ("scale-fits", {"metric": -1.0}, {}),
        ("scale-fits", {}, {"metric": 0.0}),
        ("updates-applied", {}, {"skipped": 51}),
        ("updates-applied", {"skipped": 51}, {}),
    ],
)
def test_one_bad_run_closes_its_gate_alone(name, reference, candidate):
    pairs = paired(reference=reference, candidate=candidate)
    closed = [g for g in (*gates.setup_gates(pairs, TERMS), *gates.evidence_gates(pairs, TERMS)) if g.passed is False]
    assert [gate.name for gate in closed] == [name]
    assert closed[0].advice.endswith(".")
    assert closed[0].seen


@pytest.mark.parametrize(
    ("name", "reference", "candidate"),
    [
        ("steps-taken", {}, {"applied": 1}),
        ("same-start", {}, {"first_losses": (4.07,) * 20}),
        ("arms-differ", {"first_losses": (4.0,) * 20}, {"first_losses": (4.0,) * 19 + (4.0000001,)}),
        ("updates-applied", {}, {"skipped": 50}),
        ("completed", {}, {"error": "GuardStop: lost", "diverged": True, "metric": math.nan}),
        ("weights-changed", {}, {"weights_changed": False, "diverged": True}),
    ],
)
def test_a_near_miss_leaves_the_gate_open(name, reference, candidate):
    pairs = paired(reference=reference, candidate=candidate)
    gate = next(g for g in (*gates.setup_gates(pairs, TERMS), *gates.evidence_gates(pairs, TERMS)) if g.name == name)
    assert gate.passed is True, gate


@pytest.mark.parametrize(("start", "passed"), [(0.005, True), (0.0, True), (0.5, False)])
def test_a_metric_that_starts_at_0_is_measured_by_the_way_that_fp32_went(start, passed):
    ends = {"metric": 0.99, "first_losses": ()}
    gate = gates.check_same_start(paired(reference=ends | {"start": 0.0}, candidate=ends | {"start": start}))
    assert gate.passed is passed
    assert "inf" not in gate.seen


def test_first_losses_of_which_one_is_0_are_named():
    gate = gates.check_same_start(paired(reference={"first_losses": (0.0,)}, candidate={"first_losses": (0.3,)}))
    assert gate.passed is False
    assert gate.seen == "the first losses are 0 and 0.3 in seed 2"


def test_a_candidate_whose_every_update_was_skipped_is_sent_to_diagnosis():
    gate = gates.check_steps(paired(candidate={"applied": 0, "skipped": 1000}))
    assert gate.passed is False
    assert gate.advice == "Run floatline diagnose under fp16-mixed."


def test_what_was_not_recorded_is_not_checked():
    nothing = {"start": None, "first_losses": (), "steps": None, "applied": None, "skipped": None}
    runs = [replace(r, weights_changed=None, **nothing) for r in arms([0.001, -0.001, 0.0005])]
    pairs = pair_up(runs, candidate="fp16-mixed")
    unchecked = {
        g.name for g in (*gates.setup_gates(pairs, TERMS), *gates.evidence_gates(pairs, TERMS)) if g.passed is None
    }
    assert unchecked == {
        "steps-taken", "weights-changed", "same-start", "reference-learned", "late-enough", "updates-applied",
    }  # fmt: skip


def test_fewer_than_twenty_equal_losses_need_an_equal_end():
    few = {"first_losses": (4.0,) * 5}
    assert gates.check_arms_differ(paired(reference=few, candidate=few), TERMS).passed is True
    same_end = paired(reference=few | {"metric": 2.0}, candidate=few | {"metric": 2.0})
    assert gates.check_arms_differ(same_end, TERMS).passed is False


def test_equal_metrics_without_losses_are_taken_for_identical_arms():
    same = [run(arm, s, 0.95, first_losses=()) for s in range(3) for arm in ("fp32", "fp16-mixed")]
    assert gates.check_arms_differ(pair_up(same, candidate="fp16-mixed"), TERMS).passed is False
    same[-1] = replace(same[-1], metric=0.951)
    assert gates.check_arms_differ(pair_up(same, candidate="fp16-mixed"), TERMS).passed is True


@pytest.mark.parametrize(("end", "passed"), [(3.61, False), (3.59, True), (4.1, False)])
def test_the_reference_must_gain_a_tenth_of_its_start(end, passed):
    pairs = pair_up([run(a, 0, end) for a in ("fp32", "b")], candidate="b")
    assert gates.check_learned(pairs, TERMS).passed is passed


@pytest.mark.parametrize(("end", "passed"), [(3.65, False), (3.63, True)])
def test_the_margin_must_be_a_tenth_of_the_gain(end, passed):
    # 0.01 * end <= 0.1 * (4 - end) where end <= 3.636
    pairs = pair_up([run(a, 0, end) for a in ("fp32", "b")], candidate="b")
    assert gates.check_late_enough(pairs, TERMS).passed is passed


def test_gains_of_higher_is_better_metrics_count_upwards():
    def pairs(start, end):
        return pair_up([run(a, 0, end, start=start) for a in ("fp32", "b")], candidate="b")

    assert gates.check_learned(pairs(0.0, 0.8), SHARE).passed is True
    assert gates.check_learned(pairs(0.8, 0.81), SHARE).passed is False
    assert gates.check_learned(pairs(0.8, 0.7), SHARE).passed is False
    assert gates.check_late_enough(pairs(0.75, 0.8), SHARE).passed is False
    assert gates.check_late_enough(pairs(0.7, 0.8), SHARE).passed is True
    error = replace(SHARE, scale="log-error")
    assert gates.check_learned(pairs(0.9, 0.95), error).passed is True
    assert "from 0.9 to 0.95" in gates.check_learned(pairs(0.9, 0.95), error).seen


def test_on_the_difference_scale_the_margin_is_in_the_metrics_unit():
    pairs = pair_up([run(a, 0, -100.0, start=-1000.0) for a in ("fp32", "b")], candidate="b")
    terms = Terms(metric="reward", higher_is_better=True, scale="difference", margins=(90.0, 180.0))
    assert gates.check_late_enough(pairs, terms).passed is True
    assert gates.check_late_enough(pairs, replace(terms, margins=(91.0, 180.0))).passed is False


@pytest.mark.parametrize(("half_width", "passed"), [(0.005, True), (0.0051, False), (math.inf, False), (0.0, None)])
def test_the_noise_floor_is_at_most_half_the_margin(half_width, passed):
    assert gates.check_noise(NoiseFloor(3, 0.0, half_width), TERMS).passed is passed


def test_no_noise_floor_and_no_broken_candidate_are_not_checked():
    assert gates.check_noise(None, TERMS).passed is None
    assert gates.check_broken(None).passed is None


@pytest.mark.parametrize("verdict", ["FAIL", "MARGINAL", "INCONCLUSIVE"])
def test_a_broken_candidate_may_end_in_anything_but_pass(verdict):
    assert gates.check_broken(verdict).passed is True
    assert gates.check_broken("PASS").passed is False


def test_pairs_are_counted_against_the_smallest_look():
    assert gates.check_num_seeds(paired()[:2], TERMS).passed is False
    assert gates.check_num_seeds(paired(), TERMS).passed is True
