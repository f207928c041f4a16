"""The band and the drift: found where they are, and not where they are not."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.validation.studies import arms

from floatline.validation.verdict.comparison import Band, Drift
from floatline.validation.verdict.curves import curve_excesses, fit_drift, simultaneous_band
from floatline.validation.verdict.pairs import pair_up
from floatline.validation.verdict.statistics import quantile
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.verdict import decide, next_look

TERMS = Terms()
STEPS = tuple(range(100, 1001, 100))


def curved(excess_at, *, ends=(0.001, -0.001, 0.0005), steps=STEPS, curve_of="metric"):
    """Runs whose candidate is worse by excess_at(seed, step) along the way, and by `ends` at the end."""
    runs = []
    for run in arms(ends):
        worse = 0.0 if run.arm == "fp32" else 1.0
        values = [(s, (4.0 - 0.002 * s) * math.exp(worse * excess_at(run.seed, s))) for s in steps]
        runs.append(replace(run, curve=tuple(values), curve_of=curve_of))
    return runs


def wiggle(seed, step):
    return 0.0005 * math.sin(seed + step)


def verdict_of(runs, terms=TERMS):
    return decide(runs, candidate="fp16-mixed", terms=terms)


def test_curves_that_agree_pass():
    result = verdict_of(curved(wiggle))
    assert result.verdict == "PASS"
    assert result.band.holds
    assert not result.drift.found


def test_the_band_starts_at_thirty_percent_and_has_seven_checkpoints():
    band = simultaneous_band(STEPS, np.zeros((3, 10)), terms=TERMS, curve_of="metric")
    assert band.steps[0] == 300
    assert band.steps[-1] == 1000
    assert len(band.steps) == 7
    many = simultaneous_band(range(1, 1001), np.zeros((3, 1000)), terms=TERMS, curve_of="metric")
    assert len(many.steps) == 7
    assert (many.steps[0], many.steps[-1]) == (300, 1000)
    assert simultaneous_band((1000,), np.zeros((3, 1)), terms=TERMS, curve_of="metric").steps == (1000,)


def test_the_band_is_as_wide_as_all_checkpoints_at_once_need():
    values = np.tile([[0.01], [-0.01], [0.0]], (1, 10))
    band = simultaneous_band(STEPS, values, terms=TERMS, curve_of="metric")
    assert band.high[0] == pytest.approx(quantile(1 - 0.05 / 7, 2) / math.sqrt(3) * 0.01)
    assert band.low[0] == -band.high[0]


def test_the_band_holds_at_all_checkpoints_at_once_in_nineteen_of_twenty_studies():
    rng = np.random.default_rng(2)
    outside = 0
    for _ in range(400):
        band = simultaneous_band(STEPS, rng.normal(0, 0.01, (5, 10)), terms=TERMS, curve_of="metric")
        outside += any(high < 0 for high in band.high)
    assert outside / 400 <= 0.05 + 0.03
    assert outside > 0


def test_early_differences_are_forgiven_and_late_ones_are_not():
    early = verdict_of(curved(lambda seed, step: wiggle(seed, step) + (0.2 if step <= 200 else 0)))
    late = verdict_of(curved(lambda seed, step: wiggle(seed, step) + (0.2 if 400 <= step <= 500 else 0)))
    assert early.verdict == "PASS"
    assert late.verdict == "MARGINAL"
    assert "leaves FP32's" in late.reason


def test_a_band_too_wide_to_tell_goes_on():
    runs = curved(lambda seed, step: 0.05 * (seed - 1) if step == 500 else wiggle(seed, step))
    assert verdict_of(runs).verdict == "INCONCLUSIVE"
    assert not verdict_of(runs).band.left
    assert next_look(runs, candidate="fp16-mixed", terms=TERMS) == 5


def test_a_spike_to_infinity_leaves_the_band():
    runs = curved(wiggle)
    runs[1] = replace(runs[1], curve=tuple((s, math.inf if s == 500 else v) for s, v in runs[1].curve))
    assert verdict_of(runs).verdict == "MARGINAL"
    assert verdict_of(runs).band.mean[list(verdict_of(runs).band.steps).index(500)] == math.inf


def test_drift_towards_a_longer_horizon_is_marginal():
    # +0.2 % at step 1,000, and 0.4 % more with every doubling: +1.4 % at 8,000.
    def drifting(seed, step):
        return 0.002 + 0.004 * math.log2(step / 1000) + 0.0002 * seed

    runs = curved(drifting, ends=(0.002, 0.0022, 0.0024))
    assert verdict_of(runs).verdict == "PASS"
    far = verdict_of(runs, replace(TERMS, horizon=8000))
    assert far.verdict == "MARGINAL"
    assert far.drift.at_horizon == pytest.approx(0.0142, abs=1e-4)
    assert far.drift.slope == pytest.approx(0.004 / math.log(2), rel=1e-6)
    assert "falls behind" in far.reason
    assert next_look(runs, candidate="fp16-mixed", terms=replace(TERMS, horizon=8000)) is None


def test_a_slope_that_may_be_zero_is_no_drift():
    slopes = (0.02, -0.018, 0.001)
    runs = curved(lambda seed, step: slopes[seed] * math.log(step / 700))
    drift = verdict_of(runs, replace(TERMS, horizon=100_000)).drift
    assert drift.slope_low < 0
    assert not drift.found


def test_drift_needs_slope_and_height():
    drift = Drift(slope=0.1, slope_low=0.01, horizon=10, at_horizon=0.011, limit=0.01, steps=(1, 2, 3))
    assert drift.found
    assert not replace(drift, slope_low=0.0).found
    assert not replace(drift, at_horizon=0.01).found


def test_the_horizon_is_never_before_the_last_step():
    assert fit_drift(STEPS, np.zeros((3, 10)), terms=replace(TERMS, horizon=10)).horizon == 1000


def test_too_few_checkpoints_fit_no_line():
    assert fit_drift((100, 600, 1000), np.zeros((3, 3)), terms=TERMS) is None
    assert fit_drift((100, 600, 800, 1000), np.zeros((3, 4)), terms=TERMS) is not None
    assert fit_drift(STEPS, np.zeros((1, 10)), terms=TERMS) is None


def test_a_pass_to_a_far_horizon_without_a_line_says_so():
    result = verdict_of(arms([0.001, -0.001, 0.0005]), replace(TERMS, horizon=50_000))
    assert any("nothing is known of the way to 50,000 steps" in flag for flag in result.flags)


def test_a_band_holds_at_its_limit_and_not_above():
    band = Band(steps=(1,), mean=(0.0,), low=(-0.04,), high=(0.04,), limit=0.04, curve_of="metric")
    assert band.holds
    assert not replace(band, high=(0.041,)).holds
    assert not replace(band, low=(0.04,)).left
    assert replace(band, low=(0.041,)).left


def test_only_steps_of_all_curves_are_compared():
    runs = curved(wiggle)
    runs[1] = replace(runs[1], curve=runs[1].curve[2:])
    steps, excesses = curve_excesses(pair_up(runs, candidate="fp16-mixed"), terms=TERMS)
    assert steps == STEPS[2:]
    assert excesses.shape == (3, 8)


@pytest.mark.parametrize("case", ["none", "mixed", "apart", "negative", "unit"])
def test_curves_that_cannot_be_compared_say_why_and_are_no_obstacle(case):
    runs, terms = curved(wiggle), TERMS
    if case == "none":
        runs[1] = replace(runs[1], curve=())
    if case == "mixed":
        runs[1] = replace(runs[1], curve_of="loss")
    if case == "apart":
        runs[1] = replace(runs[1], curve=((7, 1.0),))
    if case == "negative":
        runs[1] = replace(runs[1], curve=tuple((s, -1.0) for s in STEPS))
    if case == "unit":
        runs = curved(wiggle, curve_of="loss")
        terms = Terms(scale="difference", margins=(0.1, 0.2))
    assert isinstance(curve_excesses(pair_up(runs, candidate="fp16-mixed"), terms=terms), str)
    result = verdict_of(runs, terms)
    assert result.band is None
    assert result.verdict == "PASS"
    assert any("only the ends were compared" in note for note in result.notes)


def test_a_loss_curve_of_an_accuracy_is_lower_is_better():
    terms = Terms(metric="accuracy", higher_is_better=True)
    runs = [
        replace(r, metric=0.9, start=0.1) for r in curved(lambda seed, step: 0.05 + wiggle(seed, step), curve_of="loss")
    ]
    _, excesses = curve_excesses(pair_up(runs, candidate="fp16-mixed"), terms=terms)
    assert (excesses > 0.04).all()
