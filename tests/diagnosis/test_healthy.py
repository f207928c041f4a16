"""Healthy look-alikes: training that resembles a silent failure has no finding."""

from pathlib import Path

import pytest
from tests.slow import mostly_slow, slow

from floatline.diagnosis.target_diagnosis import diagnose

TARGETS = Path(__file__).parent / "targets" / "silent_healthy.py"

NAMES = (
    "converged_with_gradients_that_underflow",
    "converged_where_every_update_is_lost",
    "margins_all_met",
    "plateau_before_it_learns",
    "branches_that_round_away",
    "count_beyond_what_bf16_counts",
    "whole_numbers_used_smoothly",
    "plateau_of_noise",
    "long_search_for_a_scale",
    "average_that_moves",
)


@slow
@pytest.mark.parametrize("name", mostly_slow(NAMES, every=8))
def test_a_look_alike_is_healthy(name):
    result = diagnose(f"{TARGETS}:{name}")
    assert (result.verdict, result.findings) == ("healthy", ())


@slow
def test_the_check_above_can_fail():
    failing = TARGETS.with_name("silent_failures.py")
    assert diagnose(f"{failing}:counter_that_stops").verdict == "precision"
