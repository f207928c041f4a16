"""A candidate that is as good as FP32 passes only if it saves as much as was asked for."""

import pytest
from tests.validation.studies import arms

from floatline.errors import ComparisonError
from floatline.validation.costs.worth import Wanted
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.timing import compare_times
from floatline.validation.verdict.verdict import decide

CANDIDATE = "fp16-mixed"
GOOD = decide(arms([0.001, -0.001, 0.0005]), candidate=CANDIDATE, terms=Terms())
BAD = decide(arms([0.05, 0.052, 0.049]), candidate=CANDIDATE, terms=Terms())
TIMES = {CANDIDATE: compare_times([1.0] * 20, [0.79 + 0.001 * k for k in range(20)])}  # 1.24 to 1.27 times as fast
MEMORY = {CANDIDATE: 0.8}
ASKED = {
    ("--faster", "1.1"): "at least 1.1× as fast",
    ("--faster", "1.1", "--smaller", "0.9"): "at least 1.1× as fast and at most 0.9 of FP32's peak memory",
    ("--smaller", "0.8"): "at most 0.8 of FP32's peak memory",
}


@pytest.mark.parametrize("wanted", [Wanted(), Wanted(1.1), Wanted(1.1, 0.9), Wanted(smaller=0.8)])
def test_a_pass_that_saves_enough_stays_one(wanted):
    found = wanted.weigh(GOOD, TIMES, MEMORY)
    assert (found.verdict, found.reason) == ("PASS", GOOD.reason)
    assert found.notes[len(GOOD.notes) :] == (
        () if not wanted.words else (f"asked of a PASS: {ASKED[tuple(wanted.words)]}",)
    )


def test_one_that_saves_less_is_marginal_and_says_by_how_much():
    slow = Wanted(1.5).weigh(GOOD, TIMES, MEMORY)
    assert (slow.verdict, slow.reason.partition(", but ")[2]) == (
        "MARGINAL", "it is shown to be 1.24× as fast, and 1.5× was asked for"
    )  # fmt: skip
    both = Wanted(1.5, 0.7).weigh(GOOD, TIMES, MEMORY)
    assert both.reason.endswith("and it needs 0.80 of FP32's memory, and 0.7 was asked for")


def test_the_slow_end_of_the_interval_counts():
    shaky = {CANDIDATE: compare_times([1.0] * 12, [0.5, 1.2] * 6)}
    assert shaky[CANDIDATE].speedup > 1.1
    assert Wanted(1.1).weigh(GOOD, shaky, MEMORY).verdict == "MARGINAL"


def test_what_was_not_measured_is_not_shown():
    assert "its speed was not measured" in Wanted(1.1).weigh(GOOD, {}, MEMORY).reason
    assert "its memory was not measured" in Wanted(smaller=0.9).weigh(GOOD, TIMES, {}).reason


def test_what_does_not_pass_stays_as_it_is():
    found = Wanted(9.0, 0.1).weigh(BAD, TIMES, MEMORY)
    assert (found.verdict, found.reason) == (BAD.verdict, BAD.reason)


@pytest.mark.parametrize("wrong", [{"faster": 0.0}, {"faster": -1.0}, {"smaller": 0.0}, {"smaller": float("nan")}])
def test_what_is_no_ratio_is_refused_in_one_line(wrong):
    with pytest.raises(ComparisonError, match="is no ratio"):
        Wanted(**wrong)
