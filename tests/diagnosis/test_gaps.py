"""How far a run is from FP32: what counts as apart, and what does not."""

import math

import pytest

from floatline.diagnosis.gaps import (
    APART,
    Shown,
    find_line_gaps,
    find_slight_gaps,
    measure_gap,
    measure_loss_gap,
)


def falling(num=50, start=3.0, end=1.0, noise=0.0):
    """Losses that fall, with noise that is the same in every run, as batches make it."""
    return tuple(end + (start - end) * math.exp(-4 * i / num) + noise * math.sin(7.3 * i) for i in range(num))


def test_the_same_losses_are_not_apart():
    gap = measure_gap(falling(), falling())
    assert gap.share == 0.0
    assert not gap.is_apart(APART, None)


def test_a_run_that_stays_above_is_apart_by_the_share_that_it_lacks():
    gap = measure_gap(falling(end=1.5), falling())
    assert gap.share == pytest.approx(0.25, abs=0.05)
    assert gap.is_apart(APART, None)
    assert gap.first == pytest.approx(sum(falling()[:5]) / 5)
    assert gap.last == pytest.approx(1.04, abs=0.02)


def test_noise_of_the_batches_is_in_both_and_does_not_count():
    assert measure_gap(falling(noise=0.8), falling(noise=0.8)).share == 0.0
    apart = measure_gap(falling(end=1.5, noise=0.8), falling(noise=0.8))
    assert apart.is_apart(APART, None)


def test_losses_on_both_sides_of_fp32_are_not_apart():
    wobbling = tuple(x + (0.3 if i // 5 % 2 else -0.3) for i, x in enumerate(falling()))
    assert measure_gap(wobbling, falling()).share == 0.0


def test_what_a_nudge_does_as_well_is_not_apart():
    gap, floor = measure_gap(falling(end=1.5), falling()), measure_gap(falling(end=1.2), falling())
    assert gap.is_apart(APART, None)
    assert not gap.is_apart(APART, floor)


def test_a_run_may_lag_by_the_steps_that_it_left_out():
    late = (*[3.0] * 5, *falling()[:45])
    own = Shown(late, skipped=tuple(range(5)))
    assert not measure_loss_gap(own, Shown(falling())).is_apart(APART, None)
    for_nothing = Shown((*[3.0] * 25, *falling()[:25]), skipped=(0,))  # far behind, by one step that was left out
    assert measure_loss_gap(for_nothing, Shown(falling())).is_apart(APART, None)


def test_steps_that_fp32_left_out_as_well_are_no_lag_and_more_of_them_let_a_run_be_ahead():
    late = Shown((*[3.0] * 5, *falling()[:45]), skipped=tuple(range(5)))
    assert measure_loss_gap(late, late).share == 0.0
    behind = Shown((*[3.0] * 15, *falling()[:35]), skipped=tuple(range(5)))
    assert measure_loss_gap(behind, late).is_apart(APART, None)
    assert not measure_loss_gap(Shown(falling()), late).is_apart(APART, None)


def test_rows_that_are_shifted_against_each_other_are_compared_by_what_they_scatter_about():
    """Of a loop that ends early: 0, then a little, then more, then again from 0."""
    waves = tuple((0.0, 0.01, 0.03, 0.06)[i % 4] for i in range(80))
    shifted = waves[3:]
    assert not find_line_gaps(Shown((), lines={"a.py:3": shifted}), Shown((), lines={"a.py:3": waves}))
    larger = tuple(0.1 + x for x in shifted)
    assert find_line_gaps(Shown((), lines={"a.py:3": larger}), Shown((), lines={"a.py:3": waves}))


def test_what_a_copy_differs_by_is_0_in_fp32_and_a_count_of_faults_is_no_such_number():
    fp32 = Shown((), lines={"a.py:3": (0.0,) * 8})
    assert not find_line_gaps(Shown((), lines={"a.py:3": (0.001, 0.002) * 4}), fp32)
    assert find_line_gaps(Shown((), lines={"a.py:3": (3.0, 5.0) * 4}), fp32)
    assert find_line_gaps(Shown((), lines={"a.py:3": (0.3,)}), Shown((), lines={"a.py:3": (0.0,)}))


def test_a_last_loss_that_is_printed_is_apart_by_a_share_of_the_way_and_another_number_by_one_of_its_size():
    losses = falling(start=2.0, end=0.0004)
    last = sum(losses[-5:]) / 5
    fp32 = Shown(losses, lines={"a.py:3": (last,), "a.py:4": (0.9,)})
    assert not find_line_gaps(Shown(losses, lines={"a.py:3": (1.5 * last,), "a.py:4": (0.9,)}), fp32)
    assert set(find_line_gaps(Shown(losses, lines={"a.py:3": (1.0,), "a.py:4": (0.7,)}), fp32)) == {"a.py:3", "a.py:4"}


def test_rows_of_a_run_that_was_cut_are_compared_place_by_place():
    row = tuple(1.0 + 0.5 * math.sin(i) for i in range(40))
    off = tuple(1.3 * x for x in row[:20])
    cut, whole = (Shown((), lines={"a.py:3": off}, cut=is_cut) for is_cut in (True, False))
    assert find_line_gaps(cut, Shown((), lines={"a.py:3": row}))
    assert not find_line_gaps(whole, Shown((), lines={"a.py:3": row}))


def test_losses_that_are_not_finite_are_left_out_and_too_few_say_nothing():
    some = tuple(math.nan if i < 3 else x for i, x in enumerate(falling()))
    assert measure_gap(some, falling()).share == 0.0
    assert measure_gap((math.nan,) * 50, falling()) is None
    assert measure_loss_gap(Shown((1.0, 0.9)), Shown((1.0, 0.9))) is None


def test_a_line_that_reads_other_numbers_is_found():
    own = Shown(falling(), lines={"a.py:3": (0.6, 0.61, 0.6), "a.py:4": (0.9, 0.9, 0.9)})
    fp32 = Shown(falling(), lines={"a.py:3": (0.9, 0.91, 0.9), "a.py:4": (0.9, 0.89, 0.9)})
    assert set(find_line_gaps(own, fp32)) == {"a.py:3"}


def test_numbers_that_are_no_row_in_time_are_compared_all_together():
    weights = tuple(0.1 * (1 + i % 5) for i in range(24))
    fp32 = Shown((), lines={"a.py:3": weights})
    half_lost = Shown((), lines={"a.py:3": tuple(0.0 if i % 2 else x for i, x in enumerate(weights))})
    rounded = Shown((), lines={"a.py:3": tuple(x * (1.01 if i % 2 else 0.99) for i, x in enumerate(weights))})
    assert set(find_line_gaps(half_lost, fp32)) == {"a.py:3"}
    assert not find_line_gaps(rounded, fp32)


def test_scaled_numbers_are_those_of_fp32():
    fp32 = Shown((), lines={"a.py:3": (1.1, 0.9, 0.7, 0.6, 0.5)})
    scaled = Shown((), lines={"a.py:3": tuple(65536 * x for x in fp32.lines["a.py:3"])})
    larger = Shown((), lines={"a.py:3": tuple(90000 * x for x in fp32.lines["a.py:3"])})
    assert not find_line_gaps(scaled, fp32)
    assert set(find_line_gaps(larger, fp32)) == {"a.py:3"}


def test_a_number_that_is_not_finite_is_apart_unless_steps_were_left_out_for_it():
    fp32 = Shown(falling(), lines={"a.py:3": (1.0, 1.1, 1.2)})
    lost = {"a.py:3": (math.nan, 1.1, 1.2)}
    assert set(find_line_gaps(Shown(falling(), lines=lost), fp32)) == {"a.py:3"}
    assert not find_line_gaps(Shown(falling(), skipped=(0,), lines=lost), fp32)


def test_printed_numbers_are_apart_by_more_than_their_last_digits():
    fp32 = Shown((), lines={"a.py:3 (loss)": (0.01,)})
    own = {"a.py:3 (loss)": (0.03,)}
    assert set(find_line_gaps(Shown((), lines=own, quanta={"a.py:3 (loss)": 0.001}), fp32)) == {"a.py:3 (loss)"}
    assert not find_line_gaps(Shown((), lines=own, quanta={"a.py:3 (loss)": 0.01}), fp32)


def test_a_few_numbers_are_slightly_apart_by_a_share_of_their_size_and_a_row_is_not():
    fp32 = Shown((), lines={"a:1": (4.0,), "a:2": (4.0,) * 8, "a:3 (n)": (4.0,)})
    own = Shown((), lines={"a:1": (3.8,), "a:2": (3.8,) * 8, "a:3 (n)": (3.8,)}, quanta={"a:3 (n)": 0.1})
    assert set(find_slight_gaps(own, fp32, 0.03)) == {"a:1"}
    assert not find_slight_gaps(own, fp32, 0.06)


def test_a_run_until_its_failure_ends_with_its_last_finite_loss():
    assert Shown((2.0, 1.0, math.nan, 1.0)).until_failure().losses == (2.0, 1.0)
    assert Shown((2.0, 1.0)).until_failure().losses == (2.0, 1.0)


def test_a_log_that_was_cut_short_is_read_up_to_there(tmp_path):
    log, reads = tmp_path / "log", tmp_path / "reads"
    log.write_text('{"step": 0, "loss": 2.0, "applied": true}\n{"step": 1, "loss": null, "applied": false}\n{"st')
    reads.write_text('{"lines": {"a.py:1": [1.0, null]}, "quanta": {}}')
    seen = Shown.read(log, reads)
    assert seen.losses[0] == 2.0
    assert math.isnan(seen.losses[1])
    assert seen.skipped == (1,)
    assert seen.lines["a.py:1"][0] == 1.0
    assert Shown.read(tmp_path / "none", tmp_path / "none").losses == ()
