"""Runs as data, and how much worse one arm is."""

import json
import math

import pytest

from floatline.errors import ComparisonError
from floatline.validation.verdict.pairs import ArmRun, Pair, excess, pair_up, unpaired_seeds
from floatline.validation.verdict.terms import Terms, looks_between

LOSS = Terms()
SHARE = Terms(metric="hmean", higher_is_better=True)
ERROR = Terms(metric="accuracy", higher_is_better=True, scale="log-error")
PLAIN = Terms(metric="reward", higher_is_better=True, scale="difference", margins=(1.0, 2.0))


def test_positive_is_worse_on_every_scale():
    assert excess(2.0, 2.02, LOSS) == pytest.approx(math.log(1.01))
    assert excess(0.8, 0.792, SHARE) == pytest.approx(-math.log(0.99))
    assert excess(0.98, 0.97, ERROR) == pytest.approx(math.log(1.5))
    assert excess(-100.0, -103.0, PLAIN) == 3.0


def test_better_is_negative_on_every_scale():
    assert excess(2.0, 1.98, LOSS) < 0
    assert excess(0.8, 0.81, SHARE) < 0
    assert excess(0.98, 0.99, ERROR) < 0
    assert excess(-100.0, -99.0, PLAIN) < 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("terms", [LOSS, SHARE, ERROR, PLAIN])
def test_a_candidate_that_is_not_finite_is_infinitely_worse(value, terms):
    assert excess(0.5, value, terms) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_cannot_be_compared_with(value):
    with pytest.raises(ComparisonError, match="ended finite"):
        excess(value, 1.0, LOSS)


@pytest.mark.parametrize(
    ("reference", "candidate", "terms"),
    [(-1.0, 1.0, LOSS), (1.0, -1.0, LOSS), (1.0, 0.0, LOSS), (0.0, 0.5, SHARE), (1.0, 0.9, ERROR), (0.9, 1.0, ERROR)],
)
def test_a_value_without_a_logarithm_is_refused_with_the_way_out(reference, candidate, terms):
    with pytest.raises(ComparisonError, match="scale 'difference'"):
        excess(reference, candidate, terms)
    plain = Terms(metric="m", higher_is_better=terms.higher_is_better, scale="difference")
    assert math.isfinite(excess(reference, candidate, plain))


def test_a_share_that_fell_to_zero_is_infinitely_worse():
    assert excess(0.8, 0.0, SHARE) == math.inf


def test_seeds_of_one_arm_only_are_left_out_and_named():
    runs = [ArmRun("fp32", 2, 1.0), ArmRun("fp32", 0, 1.0), ArmRun("b", 0, 1.0), ArmRun("b", 5, 1.0)]
    assert [pair.seed for pair in pair_up(runs, candidate="b")] == [0]
    assert unpaired_seeds(runs, candidate="b") == (2, 5)


def test_pairs_keep_the_order_of_the_reference():
    runs = [ArmRun(arm, seed, 1.0) for arm, seeds in (("fp32", (7, 1, 4)), ("b", (1, 4, 7))) for seed in seeds]
    assert [pair.seed for pair in pair_up(runs, candidate="b")] == [7, 1, 4]


def test_a_seed_given_twice_is_refused():
    with pytest.raises(ComparisonError, match="seed 3 twice"):
        pair_up([ArmRun("fp32", 3, 1.0), ArmRun("fp32", 3, 1.1)], candidate="b")


def test_a_nan_metric_is_lost_and_a_run_that_raised_is_not():
    assert ArmRun("b", 0, math.nan).lost
    assert ArmRun("b", 0, 1.0, diverged=True).lost
    assert not ArmRun("b", 0, math.nan, error="RuntimeError: out of memory").lost
    assert not ArmRun("b", 0, 1.0).lost


def test_a_pair_diverged_only_where_the_reference_did_not():
    lost, sound = ArmRun("b", 0, math.nan), ArmRun("fp32", 0, 1.0)
    assert Pair(sound, lost).diverged
    assert not Pair(lost, lost).diverged
    assert Pair(sound, lost).excess(LOSS) == math.inf


def test_a_run_comes_back_from_json_bit_by_bit():
    run = ArmRun(
        "b",
        3,
        0.1 + 0.2,
        start=math.inf,
        curve=((1, 2.0), (5, -math.inf)),
        first_losses=(1 / 3,),
        steps=5,
        memory={"peak": 7},
    )
    text = json.dumps(run.as_json(), allow_nan=False)
    assert ArmRun.from_json(json.loads(text)) == run
    assert math.isnan(ArmRun.from_json(ArmRun("b", 0, math.nan).as_json()).metric)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": "a"}, "'seed'"),
        ({"metric": None}, "'metric'"),
        ({"curve": [[1]]}, "curve"),
        ({"steps": -1}, "Give 0 or more"),
        ({"curve": [[2, 1.0], [1, 1.0]]}, "Order it by step"),
        ({"colour": 1}, "'colour'"),
        ({"arm": ""}, "no name"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_the_field(change, word):
    with pytest.raises(ComparisonError, match=word):
        ArmRun.from_json({"arm": "b", "seed": 0, "metric": 1.0} | change)


def test_a_list_is_no_run():
    with pytest.raises(ComparisonError, match="JSON object"):
        ArmRun.from_json([1])


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"scale": "ratio"}, "not known"),
        ({"scale": "log-error"}, "higher-is-better"),
        ({"margins": (0.02, 0.01)}, "do not rise"),
        ({"margins": (0.0, 0.01)}, "do not rise"),
        ({"looks": (1, 2)}, "must rise"),
        ({"alpha": 0.5}, "between 0 and 0.5"),
        ({"horizon": 0}, "trains nothing"),
    ],
)
def test_terms_that_cannot_be_met_are_refused(setting, word):
    with pytest.raises(ComparisonError, match=word):
        Terms(**setting)


def test_terms_come_back_from_json():
    assert Terms.from_json(json.loads(json.dumps(ERROR.as_json()))) == ERROR


def test_looks_end_at_the_most_seeds():
    assert looks_between(3, 20) == (3, 5, 8, 12, 20)
    assert looks_between(3, 9) == (3, 5, 8, 9)
    assert looks_between(3, 3) == (3,)
    assert looks_between(5, 20) == (5, 8, 12, 20)
    assert looks_between(6, 12) == (6, 8, 12)
    assert looks_between(7, 7) == (7,)
    with pytest.raises(ComparisonError, match="fewer than the smallest look"):
        looks_between(3, 2)
    with pytest.raises(ComparisonError, match="At least 8 seeds and at most 5 cannot be"):
        looks_between(8, 5)
