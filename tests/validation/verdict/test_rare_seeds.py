"""Rare bad seeds: how many could be there unseen, and one that is there is not averaged away."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.validation.studies import arms, with_nudged

from floatline.errors import ComparisonError
from floatline.validation.verdict.pairs import pair_up
from floatline.validation.verdict.rare_seeds import describe_tail, find_early_signs, find_far_worse
from floatline.validation.verdict.terms import Terms, looks_between, seeds_to_bound, share_unseen
from floatline.validation.verdict.verdict import decide, next_look

TERMS = Terms()
CANDIDATE = "fp16-mixed"
QUIET = [0.001, -0.001, 0.0005, 0.0012, -0.0008]


def verdict_of(runs, terms=TERMS):
    return decide(runs, candidate=CANDIDATE, terms=terms)


@pytest.mark.parametrize("num", [3, 5, 29, 59])
def test_so_many_good_seeds_are_seen_once_in_twenty_at_the_share_that_is_said(num):
    assert (1 - share_unseen(num)) ** num == pytest.approx(0.05)


def test_29_seeds_bound_the_share_by_a_tenth_and_28_do_not():
    assert seeds_to_bound(0.1) == 29
    assert share_unseen(29) <= 0.1 < share_unseen(28)


@pytest.mark.parametrize("share", [0.0, 1.0, 2.0, -0.1, math.nan])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(ComparisonError, match="not between 0 and 1"):
        looks_between(3, 20, share)


def test_a_pass_says_what_it_leaves_open():
    flags = verdict_of(arms(QUIET[:3])).flags
    assert flags[0] == (
        "up to 63 % of seeds could fail, and these 3 would not have shown it; "
        "--rare 0.1 runs 29 seeds, which leave 10 %"
    )
    assert "--rare" not in describe_tail(29)
    assert not any("could fail" in flag for flag in verdict_of(arms([0.05, 0.052, 0.049])).flags)


def test_a_share_that_is_to_be_ruled_out_asks_for_as_many_seeds_before_a_pass():
    terms = Terms(rare=0.1, looks=looks_between(3, 20, 0.1))
    assert terms.looks == (3, 5, 8, 12, 20, 29)
    quiet = [0.001 * math.sin(7 * seed) for seed in range(29)]
    held = verdict_of(arms(quiet[:20]), terms)
    assert (held.verdict, held.reason) == (
        "INCONCLUSIVE", "it is within 1.00 %; 29 seeds are to rule out 10 % bad ones"
    )  # fmt: skip
    assert next_look(arms(quiet[:20]), candidate=CANDIDATE, terms=terms) == 29
    assert verdict_of(arms(quiet), terms).verdict == "PASS"
    assert verdict_of(arms([0.05, 0.052, 0.049]), terms).verdict == "FAIL"  # not held back


@pytest.mark.parametrize("wrong", [{"rare": 0.0}, {"rare": 1.0}, {"rare": 0.1}, {"resolution": 0.0}])
def test_terms_that_cannot_be_kept_are_refused_in_one_line(wrong):
    with pytest.raises(ComparisonError) as refused:
        Terms(**wrong)
    assert "\n" not in str(refused.value)


def test_a_seed_that_is_far_worse_is_named_and_never_averaged_away():
    excesses = [0.0005 * math.sin(7 * seed) for seed in range(20)]
    excesses[11] = 0.03
    runs = arms(excesses)
    assert verdict_of(arms(excesses[:5])).verdict == "PASS"
    spread = with_nudged(runs, [0.0004] * 20)
    terms = Terms(looks=(20,))
    for found in (verdict_of(runs, terms), verdict_of(spread, terms)):
        assert found.verdict == "MARGINAL"
        assert "seed 11 ends 2.96 % worse, far more than the other seeds" in found.reason


def test_several_seeds_that_are_far_worse_do_not_hide_each_other():
    excesses = [-0.005 + 0.0003 * math.sin(7 * seed) for seed in range(20)]
    for seed in (3, 9, 14):
        excesses[seed] = 0.025
    terms = Terms(looks=(20,))
    found = verdict_of(with_nudged(arms(excesses), [0.0004] * 20), terms)
    assert found.interval[1] < TERMS.margins[0]
    assert found.verdict == "MARGINAL"
    assert all(f"seed {seed} ends" in found.reason for seed in (3, 9, 14))


def test_a_seed_that_nudged_fp32_shows_as_well_is_noise():
    excesses = [0.0005 * math.sin(7 * seed) for seed in range(20)]
    excesses[11] = 0.03
    noisy = with_nudged(arms(excesses), [0.015 if seed == 3 else 0.0004 for seed in range(20)])
    pairs = pair_up(noisy, candidate=CANDIDATE)
    assert find_far_worse(pairs, pair_up(noisy, candidate="fp32-nudged"), TERMS) == {}
    assert set(find_far_worse(pairs, (), TERMS)) == {11}


def test_a_curve_that_leaves_fp32s_and_comes_back_is_seen():
    def with_curve(one, bump):
        apart = {step: (1e-4 * one.seed + bump * (one.seed == 2 and step == 6)) for step in range(1, 11)}
        shares = apart if one.arm == CANDIDATE else dict.fromkeys(apart, 0.0)
        return replace(one, curve=tuple((step, (4.0 - 0.2 * step) * (1 + share)) for step, share in shares.items()))

    for bump, seeds in ((0.2, {2}), (0.0, set())):
        pairs = pair_up([with_curve(one, bump) for one in arms([0.0] * 6)], candidate=CANDIDATE)
        assert set(find_far_worse(pairs, (), TERMS)) == seeds


def with_trouble(excesses, **trouble):
    """Runs of which the candidate's seed 2 has some trouble on its way, and a usual end."""
    usual = {"peak": 3.0, "skipped": 1}
    runs = [replace(one, **usual) for one in arms(excesses)]
    return [replace(one, **trouble) if (one.arm, one.seed) == (CANDIDATE, 2) else one for one in runs]


@pytest.mark.parametrize(
    ("trouble", "seen"),
    [
        ({"peak": 9.0}, "seed 2's training loss rises to 3.0 times the highest of FP32"),
        ({"skipped": 30}, "seed 2 left out 30 of 1000 updates"),
    ],
)
def test_a_spike_and_updates_left_out_in_one_seed_are_told_and_end_a_search_for_rare_seeds_early(trouble, seen):
    quiet = [0.0005 * math.sin(7 * seed) for seed in range(5)]
    found = verdict_of(with_trouble(quiet, **trouble), Terms(looks=(5,)))
    assert found.verdict == "PASS"
    assert any(flag.startswith(seen) for flag in found.flags)
    rare = Terms(looks=(5, 29), rare=0.1)
    found = verdict_of(with_trouble(quiet, **trouble), rare)
    assert found.verdict == "MARGINAL"
    assert seen in found.reason
    assert verdict_of(with_trouble(quiet), rare).verdict == "INCONCLUSIVE"  # 29 seeds are needed


def test_spikes_that_nudged_fp32_has_as_well_are_no_sign():
    runs = with_trouble([0.0] * 6, peak=9.0)
    nudged = [replace(one, peak=8.0 if one.seed == 4 else 3.0) for one in with_nudged(runs, [0.0] * 6)[-6:]]
    pairs = pair_up(runs, candidate=CANDIDATE)
    assert set(find_early_signs(pairs, ())) == {2}
    assert find_early_signs(pairs, pair_up([*runs, *nudged], candidate="fp32-nudged")) == {}


def test_equal_noise_in_both_arms_is_seldom_called_far_worse():
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(300):
        runs = with_nudged(arms(0.01 * rng.standard_normal(8)), 0.01 * rng.standard_normal(8))
        found = find_far_worse(pair_up(runs, candidate=CANDIDATE), pair_up(runs, candidate="fp32-nudged"), TERMS)
        wrong += bool(found)
    assert wrong / 300 <= 0.02


def test_differences_that_follow_one_another_are_told_beside_a_pass_and_independent_ones_are_not():
    drifting = [0.0002 * seed for seed in range(20)]
    assert any("follows the last one's" in flag for flag in verdict_of(arms(drifting), Terms(looks=(20,))).flags)
    mixed = [0.0002 * (7 * seed % 20) for seed in range(20)]
    assert not any("follows" in flag for flag in verdict_of(arms(mixed), Terms(looks=(20,))).flags)
