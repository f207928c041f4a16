"""When a short run counts as trained, and how a finding's place is put into a plan's words."""

import math
from pathlib import Path

import pytest

from floatline.rescuing.candidates import name_function
from floatline.rescuing.short_run import Trial, find_shortfall

FP32 = Trial(tuple(1.0 - 0.02 * i for i in range(40)), (), "", 0.0)


def run(losses, skipped=(), error=""):
    return Trial(tuple(losses), tuple(skipped), error, 0.0)


def test_a_run_that_follows_fp32_lacks_nothing():
    assert find_shortfall(run(loss + 0.01 for loss in FP32.losses), FP32) == ""


@pytest.mark.parametrize(
    ("trial", "says"),
    [
        (run(FP32.losses, error="weights are not finite"), "weights are not finite"),
        (run([*FP32.losses[:-1], math.nan]), "the loss is not finite"),
        (run([math.nan] * 40), "the loss is not finite"),
        (run([0.9] * 40), "the loss ends at 0.9"),
        (run(FP32.losses, skipped=range(25, 40)), "15 of the last 20 steps were skipped"),
        (run([]), "the loss is not finite"),
        (
            run(0.5 * loss for loss in FP32.losses),
            "the loss begins at 0.5, in FP32, with the same weights and batch, at 1",
        ),
    ],
)
def test_what_a_run_lacks_is_said(trial, says):
    assert find_shortfall(trial, FP32).startswith(says)


def test_the_search_for_a_scale_at_the_start_is_not_held_against_a_run():
    losses = [*FP32.losses[:1] * 10, *FP32.losses[:30]]
    assert find_shortfall(run(losses, skipped=range(10)), FP32) == ""
    assert find_shortfall(run(losses), FP32) != ""


def test_the_function_around_a_line_has_its_class_in_its_name(tmp_path):
    file = Path(tmp_path, "net.py")
    file.write_text("class Net:\n    def forward(self):\n        return 1\n\n\ndef loss():\n    return 2\n\n\nx = 3\n")
    assert [name_function(file, line) for line in (3, 7, 10)] == ["Net.forward", "loss", ""]
    assert name_function(Path(tmp_path, "missing.py"), 1) == ""
