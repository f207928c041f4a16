"""What the page's chart is given: thinned, with gaps where there is no number, on the scale of the verdict."""

import math

import pytest
from tests.report.validation.validations import make_run, make_validation

from floatline.report.validation.evidence import MOST_POINTS, curves_of
from floatline.report.validation.layers import layer_part
from floatline.validation.result import LayerNumbers
from floatline.validation.verdict.pairs import pair_up
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.verdict import decide


def test_means_are_of_all_seeds_at_every_step():
    validation = make_validation()
    data = curves_of(validation.best, validation.runs)
    ends = [run.curve[-1][1] for run in validation.runs if run.arm == "fp32" and run.seed in validation.best.seeds]
    assert data["arms"][0]["mean"][-1] == pytest.approx(sum(ends) / len(ends), rel=1e-6)


def test_the_last_excess_is_that_of_the_verdict():
    validation = make_validation()
    best = validation.best
    excess = curves_of(best, validation.runs)["excess"]
    assert excess["mean"][-1] == pytest.approx(best.difference, rel=1e-6)
    pairs = pair_up(validation.runs, candidate=best.candidate)[: len(best.seeds)]
    assert [row[-1] for row in excess["seeds"]] == pytest.approx([pair.excess(best.terms) for pair in pairs], rel=1e-6)


def test_the_band_stands_at_its_checkpoints_only():
    validation = make_validation()
    data = curves_of(validation.best, validation.runs)
    at = [step for step, high in zip(data["steps"], data["excess"]["high"], strict=True) if high is not None]
    assert tuple(at) == validation.best.band.steps


def test_a_long_curve_is_thinned_and_keeps_its_ends_and_checkpoints():
    runs = [make_run(arm, seed, num_points=1500) for seed in range(3) for arm in ("fp32", "fp16-mixed")]
    comparison = decide(runs, candidate="fp16-mixed", terms=Terms())
    data = curves_of(comparison, runs)
    assert data["thinned"]
    assert len(data["steps"]) <= MOST_POINTS + 7
    assert {runs[0].curve[0][0], runs[0].curve[-1][0], *comparison.band.steps} <= set(data["steps"])


def test_a_value_that_is_not_finite_is_a_gap():
    validation = make_validation({"mine": math.inf})
    mine = curves_of(validation.best, validation.runs)["arms"][1]
    assert mine["seeds"][1][-1] is None
    assert mine["mean"][-1] is None
    assert mine["mean"][0] is not None


def test_without_curves_there_is_no_chart():
    validation = make_validation(bare=True)
    assert curves_of(validation.best, validation.runs) is None


def test_a_thousand_modules_are_drawn_in_few_cells_and_the_worst_is_among_them():
    layers = [LayerNumbers(f"m{k}", 9.0, 0.0, 0.999) for k in range(1000)]
    layers[777] = LayerNumbers("m777", -math.inf, 0.0, math.nan)
    drawing, _, worst, everything = layer_part(layers).blocks
    assert drawing.svg.count("<rect") <= 3 * 240
    assert "m777: headroom overflows" in drawing.svg
    assert worst.rows[0][:2] == ("m777", "overflows")
    assert len(everything.rows) == 1000
    assert everything.folded
