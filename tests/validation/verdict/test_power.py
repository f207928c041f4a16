"""Seeds, time, speed, unpaired runs and the order of several candidates."""

import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.slow import slow
from tests.validation.studies import arms, load_benchmark, run

from floatline.errors import ComparisonError
from floatline.validation.verdict.comparison import describe_several, rank
from floatline.validation.verdict.pairs import ArmRun
from floatline.validation.verdict.power import (
    USUAL_SPREADS,
    describe_plans,
    judge_look,
    plan_seeds,
    seeds_needed,
    show_seconds,
)
from floatline.validation.verdict.terms import Terms, looks_between
from floatline.validation.verdict.timing import Timing, compare_times, draw_order
from floatline.validation.verdict.unpaired import decide_unpaired, unpaired_interval
from floatline.validation.verdict.verdict import decide

TERMS = Terms()
ROOT = Path(__file__).parents[3]


@slow
def test_the_table_of_seeds():
    assert [seeds_needed(sd, 0.01) for sd in USUAL_SPREADS] == [4, 6, 14, 42]
    assert seeds_needed(0.0, 0.01) == 3
    assert seeds_needed(1.0, 0.01) is None


@slow
def test_a_wider_margin_needs_fewer_seeds():
    assert seeds_needed(0.01, 0.02) < seeds_needed(0.01, 0.01) < seeds_needed(0.01, 0.0025)


@slow
def test_the_plan_says_what_to_expect():
    plan = plan_seeds(0.01, terms=TERMS, seconds_per_seed=60, num_at_once=2)
    assert plan.pass_rate == pytest.approx(0.918, abs=0.015)
    assert plan.expected_seeds == pytest.approx(13.6, abs=0.4)
    assert plan.seconds == pytest.approx(30 * plan.expected_seeds)
    assert plan.most_seconds == 600
    assert plan_seeds(0.01, terms=TERMS).seconds is None
    assert plan_seeds(0.02, terms=TERMS).pass_rate < 0.9


def test_the_plan_in_words():
    text = describe_plans([plan_seeds(sd, terms=TERMS, seconds_per_seed=60) for sd in (0.0025, 0.02)], terms=TERMS)
    first = "PASS up to 1.00 % worse, FAIL from 2.00 % worse. Looks at 3, 5, 8, 12, 20 seeds"
    assert text.splitlines()[0].startswith(first)
    assert "90 % would take 42 seeds" in text.splitlines()[2]
    assert "would take" not in text.splitlines()[1]
    assert (show_seconds(40), show_seconds(720), show_seconds(12600)) == ("40 s", "12 min", "3.5 h")


def test_a_plan_that_rules_out_bad_seeds_passes_nothing_before_there_are_enough():
    looks = looks_between(3, 20, rare=0.1)
    plan = plan_seeds(0.001, terms=Terms(looks=looks, rare=0.1), seconds_per_seed=60)
    assert (plan.expected_seeds, plan.seconds, plan.pass_rate) == (29, 29 * 60, 1.0)
    assert plan_seeds(0.001, terms=Terms(looks=looks)).expected_seeds < 5


def test_the_room_of_verdicts_loads_neither_torch_nor_scipy():
    names = sorted(path.stem for path in (ROOT / "src/floatline/validation/verdict").glob("[!_]*.py"))
    code = f"import sys\nfor n in {names}: __import__('floatline.validation.verdict.' + n)\nprint(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'torch'" not in loaded
    assert "'scipy'" not in loaded
    assert "'floatline.validation.verdict.verdict'" in loaded


def test_a_faster_arm_is_found_through_a_drifting_machine():
    rng = random.Random(0)
    slow = [1.0 + 0.5 * math.sin(k / 5) for k in range(40)]  # both arms of a pair share the machine's mood
    timing = compare_times(
        [s * rng.uniform(0.97, 1.03) for s in slow], [0.8 * s * rng.uniform(0.97, 1.03) for s in slow]
    )
    assert timing.verdict == "faster"
    assert timing.ratio == pytest.approx(0.8, abs=0.02)
    assert timing.low <= 0.8 <= timing.high
    assert timing.speedup == pytest.approx(1.25, abs=0.03)


def test_equal_arms_are_not_called_faster():
    timing = compare_times([1.0, 1.1, 0.9, 1.0, 1.05, 0.95], [1.02, 1.0, 0.95, 0.98, 1.06, 0.97])
    assert timing.verdict == "no difference shown"
    assert compare_times([1.0] * 6, [1.1] * 6).verdict == "slower"


def test_five_pairs_cannot_show_a_difference():
    timing = compare_times([1.0] * 5, [0.5] * 5)
    assert timing.confidence == pytest.approx(1 - 2 / 32)
    assert timing.verdict == "no difference shown"
    assert compare_times([1.0] * 6, [0.5] * 6).confidence == pytest.approx(1 - 2 / 64)


def test_the_interval_holds_the_median_as_often_as_it_says():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(500):
        timing = compare_times([1.0] * 15, np.exp(rng.standard_exponential(15)).tolist())
        held += timing.low <= math.exp(math.log(2)) <= timing.high
    assert timing.confidence >= 0.95
    assert held / 500 == pytest.approx(timing.confidence, abs=0.03)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [math.nan])])
def test_times_that_make_no_pairs_are_refused(a, b):
    with pytest.raises(ComparisonError):
        compare_times(a, b)


def test_a_timing_comes_back_from_json():
    timing = compare_times([1.0, 1.1], [0.9, 1.0])
    assert Timing.from_json(timing.as_json()) == timing


def test_each_arm_goes_first_equally_often_and_in_no_pattern():
    order = draw_order(40)
    assert order.count(("A", "B")) == order.count(("B", "A")) == 20
    assert order != tuple([("B", "A"), ("A", "B")] * 20)
    assert order == draw_order(40)
    assert order != draw_order(40, seed=1)


def unpaired(ours, theirs, **changes):
    runs = [run("fp32", seed, value) for seed, value in enumerate(ours)]
    return runs + [run("b", 100 + seed, value, **changes) for seed, value in enumerate(theirs)]


def judge(runs, terms=TERMS):
    return decide_unpaired(runs, candidate="b", terms=terms)


def test_the_unpaired_interval_is_that_of_a_worked_example():
    # s1^2/n1 = 2.5/5, s2^2/n2 = 10/5: root sqrt(2.5); 4 degrees: t 2.132; no skewness, so that both ends move by
    # 0.7 (1 + 2 t^2) / (6 sqrt(5)) = 0.526
    look = unpaired_interval([1, 2, 3, 4, 5], [2, 4, 6, 8, 10])
    assert (look.mean, look.skew) == (3.0, 0.0)
    assert look.sd == pytest.approx(math.sqrt(2.5))
    assert look.factor == pytest.approx(2.132, abs=1e-3)
    assert (look.low, look.high) == pytest.approx((3 - 2.658 * look.sd, 3 + 2.658 * look.sd), rel=1e-3)


def test_the_unpaired_interval_of_an_arm_without_noise_is_that_of_the_other_alone():
    values = [0.1, 0.3, 0.2, 0.9]
    alone = judge_look(values, terms=Terms(looks=(4,)))
    look = unpaired_interval([0.0] * 50, values)
    assert (look.low, look.high) == pytest.approx((alone.low, alone.high))


def test_unpaired_runs_of_a_coarse_metric_have_an_interval_and_equal_ones_decide_nothing():
    equal = judge(unpaired([2.0, 2.0, 2.0], [2.0, 2.0, 2.0]))
    assert (equal.verdict, "--resolution" in equal.reason) == ("INCONCLUSIVE", True)
    known = Terms(resolution=0.001)
    assert judge(unpaired([2.0, 2.0, 2.0], [2.0, 2.0, 2.0]), known).verdict == "PASS"
    coarse = judge(unpaired([2.0, 2.0, 2.0], [2.0, 2.0, 1.96]))
    assert coarse.interval[1] - coarse.interval[0] > 0.05


def test_an_unpaired_pass_counts_the_candidates_runs_and_asks_nothing_of_a_study():
    result = judge(unpaired([2.0, 2.004, 1.998, 2.001], [2.001, 2.0, 1.999]))
    assert result.flags[0] == (
        "up to 63 % of seeds could fail, and these 3 would not have shown it; 29 seeds would leave 10 %"
    )


def test_an_unpaired_run_that_is_far_worse_is_named():
    good = [2.0 + 0.0004 * math.sin(5 * k) for k in range(40)]
    bad = [*good[:30], 2.05, *good[31:]]
    assert judge(unpaired(good, good[::-1])).verdict == "PASS"
    found = judge(unpaired(good, bad))
    assert found.interval[1] < TERMS.margins[0]
    assert (found.verdict, "run 130 ends 2.4" in found.reason) == ("MARGINAL", True)


def test_unpaired_runs_get_the_same_verdicts():
    same = [2.0, 2.004, 1.998, 2.001]
    assert judge(unpaired(same, [2.001, 2.0, 1.999])).verdict == "PASS"
    assert judge(unpaired(same, [2.1, 2.11, 2.09])).verdict == "FAIL"
    assert judge(unpaired(same, [2.03, 2.031, 2.029])).verdict == "MARGINAL"
    assert judge(unpaired(same, [1.8, 2.2, 2.0])).verdict == "INCONCLUSIVE"


def test_unpaired_runs_say_so_and_are_wider_than_pairs():
    spread = [2.0, 2.2, 1.8, 2.1]
    runs = unpaired(spread, [value * 1.001 + 1e-5 * k for k, value in enumerate(spread)])
    result = judge(runs)
    assert result.paired is False
    assert "8 unpaired seeds" in str(result)
    assert any("the seeds do not match" in note for note in result.notes)
    paired = decide([replace(r, seed=r.seed % 100) for r in runs], candidate="b", terms=Terms(looks=(4,)))
    assert paired.verdict == "PASS"
    assert result.verdict == "INCONCLUSIVE"
    assert result.interval[1] - result.interval[0] > 10 * (paired.interval[1] - paired.interval[0])


@pytest.mark.parametrize(
    ("runs", "gate"),
    [
        (unpaired([2.0, 2.001], [2.0, 2.001, 2.002]), "enough-seeds"),
        (unpaired([2.0, 2.001, math.nan], [2.0, 2.001, 2.002]), "reference-finite"),
        (unpaired([2.0, 2.001, -1.0], [2.0, 2.001, 2.002]), "scale-fits"),
        (unpaired([3.99, 3.98, 3.97], [3.99, 3.98, 3.97]), "reference-learned"),
        (unpaired([2.0, 2.001, 2.002], [2.0, 2.001, 2.002], applied=0), "steps-taken"),
        (unpaired([2.0, 2.001, 2.002], [2.0, 2.001, 2.002], skipped=100), "updates-applied"),
        (unpaired([2.0, 2.001, 2.002], [2.0, 2.001, 2.002], error="boom"), "completed"),
    ],
)
def test_unpaired_runs_have_gates_too(runs, gate):
    result = judge(runs)
    assert result.verdict == "REFUSED"
    assert gate in [closed.name for closed in result.failed_gates]


def test_an_unpaired_candidate_that_diverged_fails():
    assert judge(unpaired([2.0, 2.001, 2.002], [2.0, math.nan, 2.002])).verdict == "FAIL"


def test_an_unpaired_arm_without_runs_is_an_error():
    with pytest.raises(ComparisonError, match="'b' has no runs"):
        judge([ArmRun("fp32", 0, 1.0)])


def test_candidates_are_ranked_by_verdict_then_speed_then_memory():
    def compared(name, excesses):
        return decide(arms(excesses, candidate=name), candidate=name, terms=TERMS)

    bad, good = [0.05, 0.051, 0.049], [0.001, 0.0, -0.001]
    fp16, bf16 = compared("fp16-mixed", good), compared("bf16-mixed", good)
    true, odd = compared("bf16-true", bad), compared("odd", [-0.05, -0.051, -0.049])
    order = rank(
        [true, odd, bf16, fp16], time_ratios={"fp16-mixed": 0.5, "bf16-mixed": 0.6, "bf16-true": 0.3, "odd": 0.1}
    )
    assert [c.candidate for c in order] == ["fp16-mixed", "bf16-mixed", "odd", "bf16-true"]
    by_memory = rank([fp16, bf16], memory_ratios={"fp16-mixed": 0.9, "bf16-mixed": 0.8})
    assert [c.candidate for c in by_memory] == ["bf16-mixed", "fp16-mixed"]
    closer = compared("closer", [0.0001, 0.0, -0.0001])
    assert rank([fp16, closer])[0] is closer


def test_several_candidates_are_told_of_their_common_error():
    assert describe_several(1) == ""
    assert "at most 15 %" in describe_several(3)


def test_the_simulated_table_holds_with_few_studies():
    module = load_benchmark()
    rows = {row.rule: row for row in module.simulate(num_studies=1000, seed=1)}
    ours, single, welch = (rows[name] for name in (module.PROTOCOL, module.SINGLE, module.WELCH))
    assert ours.passes[0.01] <= 0.06 + 0.015  # two standard errors of 1,000 studies
    assert ours.passes[0.02] <= 0.005
    assert ours.passes[0.03] <= 0.005
    assert ours.passes[0.0] >= 0.89
    assert ours.fails[0.0] <= 0.005
    assert single.passes[0.02] > 0.2
    assert welch.passes[0.01] > 0.8
    assert rows[module.PEEKING].passes[0.01] > 0.15
