"""The losses of short runs in one picture."""

import math

from floatline.report.losses import draw_losses, find_bad


def test_every_run_has_a_curve_a_name_and_its_numbers_in_words():
    drawn = draw_losses({"FP32": [3.0, 2.0, 1.0], "as it is": [3.0, math.nan], "rescued": [3.0, 2.0, 1.5]})
    assert drawn.legend == ("FP32", "as it is", "rescued")
    said = "FP32: from 3.00000 to 1.00000; as it is: not finite from step 1 on; rescued: from 3.00000 to 1.50000."
    assert drawn.summary == f"Losses over 3 steps. {said}"
    assert drawn.svg.count("run p0") == drawn.svg.count("run p2") == 2


def test_a_loss_that_is_not_finite_is_marked_and_one_that_is_finite_is_not():
    assert "✕" in draw_losses({"FP32": [1.0, 2.0], "as it is": [1.0, math.inf]}).svg
    assert "✕" not in draw_losses({"FP32": [1.0, 2.0], "as it is": [1.0, 3.0]}).svg
    assert (find_bad([1.0, math.nan]), find_bad([1.0]), find_bad([])) == (1, None, None)


def test_a_run_that_diverges_leaves_the_picture_at_its_top():
    svg = draw_losses({"FP32": [3.0, 1.0], "as it is": [3.0, 1e9]}).svg
    assert 'y2="22.0"' in svg


def test_names_of_users_are_escaped_and_nothing_is_drawn_without_a_finite_loss():
    assert "<b>" not in draw_losses({"<b>": [1.0, 2.0]}).svg
    assert draw_losses({"FP32": [math.nan]}) is None
    assert draw_losses({}) is None
