"""What is said of a run: states, time to go, headroom, and the same in characters."""

import math
import re

import pytest
from tests.report.run.runs import EVIL, make_run

from floatline.ledger.lines import Mark, Step
from floatline.ledger.progress import Progress
from floatline.report.run.facts import gather
from floatline.report.run.page import curves_of
from floatline.report.run.terminal import draw_runs
from floatline.report.run.texts import headroom_of, scale_of, show_percent, show_seconds, skips_of, spark, tone_of


@pytest.fixture
def facts(tmp_path):
    """Makes a run and gives its facts at its last line, or some seconds after it."""

    def facts(*, later: float = 0.0, alive: bool | None = None, told: int | None = None, **options):
        folder = tmp_path / options.pop("name", "run")
        ledger = make_run(folder, **options)
        progress = Progress(folder)
        progress.update()
        found = gather(progress, name=folder.name, now=progress.last_time + later, alive=alive, steps=told)
        ledger.close()
        return found

    return facts


def paced(folder, *, steps: int, seconds: float, planned: int | None) -> object:
    """A run at a known pace, still going on."""
    progress = Progress(folder)
    for i in range(1, steps + 1):
        progress.add(Step(i, i * seconds, True, numbers={"loss": 1.0}))
        progress.follower.accounts.run.attempted += 1
        progress.follower.accounts.run.applied += 1
    return gather(progress, name="paced", now=steps * seconds, steps=planned)


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({}, "finished"),
        ({"planned": 300}, "finished"),
        ({"planned": 301}, "interrupted"),
        ({"stop": "the loss is NaN"}, "stopped"),
        ({"close": False}, "running"),
        ({"close": False, "later": 59, "alive": True}, "running"),
        ({"close": False, "later": 61, "alive": True}, "silent"),
        ({"close": False, "later": 61}, "silent"),
        ({"close": False, "later": 61, "alive": False}, "died"),
        ({"close": False, "later": 5, "alive": False}, "running"),  # it may have written just now
        ({"alive": False}, "finished"),
    ],
)
def test_the_state_is_what_the_ledger_shows(facts, options, state):
    assert facts(**options).state == state


def test_the_time_to_go_is_that_of_the_newest_steps(tmp_path):
    run = paced(tmp_path, steps=100, seconds=0.5, planned=400)
    assert run.eta == pytest.approx(150.0)
    assert "step 100 of 400 · ETA 2 min 30 s" in draw_runs([run], width=100).plain


def test_without_the_number_of_steps_there_is_no_time_to_go(tmp_path):
    run = paced(tmp_path, steps=100, seconds=0.5, planned=None)
    assert run.eta is None
    assert "ETA unknown: say --steps" in draw_runs([run], width=100).plain


def test_a_run_that_is_over_has_no_time_to_go(facts):
    assert facts(planned=900).eta is None


def test_the_headroom_is_that_of_the_highest_norm_against_the_format(facts):
    run = facts()
    by_name = {layer.name: layer for layer in run.layers}
    # Norm 1 at scale 65,536 is just above the largest number, 65,504: nothing is known of the elements.
    assert by_name["body.0.weight"].headroom == pytest.approx(math.log2(65504) - 16)
    assert by_name["body.1.weight"].headroom == pytest.approx(math.log2(65504) - 15)
    assert headroom_of(by_name["body.0.weight"]) == "unknown: norm 1× max"
    assert headroom_of(by_name["body.1.weight"]) == "≥ 1.0 doublings"
    assert [tone_of(by_name[name]) for name in ("body.0.weight", "body.1.weight")] == ["unsure", "warn"]
    assert by_name["head.weight"].num_nonfinite == 6
    assert [layer.name for layer in run.layers] == ["head.weight", "body.0.weight", "body.1.weight"]


def test_the_headroom_follows_the_format(facts):
    fp16, bf16 = facts(name="a"), facts(name="b", plan="bf16")
    difference = bf16.layers[1].headroom - fp16.layers[1].headroom
    assert difference == pytest.approx(math.log2(3.3895313892515355e38) - math.log2(65504))


def test_no_element_of_a_gradient_is_nearer_to_the_ceiling_than_its_norm():
    import torch

    for seed in range(20):
        grad = torch.randn(1000, generator=torch.Generator().manual_seed(seed)) ** 3
        assert float(grad.abs().max()) <= float(grad.norm())


def test_without_a_plan_there_are_norms_and_no_headroom(facts):
    run = facts(plan=None)
    assert run.format is None
    assert all(layer.headroom is None for layer in run.layers)
    text = draw_runs([run], width=100).plain
    assert "the ledger names no format" in text and "doublings" not in text


def test_the_json_has_the_numbers(facts):
    found = facts(planned=300).as_json()
    assert found["attempted"] == 300 and found["applied"] == 293
    assert found["skipped"] == {"overflow": 6, "forward-nonfinite": 1}
    assert found["loss"] == {"first": 4.0, "last": 1.0, "mean": found["loss"]["mean"], "num_nan": 1, "num_inf": 0}
    assert found["scale"] == {"last": 2048.0, "lowest": 2048.0, "highest": 65536.0, "num_reductions": 5}
    assert found["lost_share"] == 0.0125
    assert found["layers"][0]["name"] == "head.weight"
    assert found["last_event"].startswith("rollback after step 120")


def test_the_view_says_it_in_characters(facts):
    text = draw_runs([facts(planned=300)], width=110).plain
    assert text.splitlines()[0].startswith("run  finished  step 300 of 300 · took")
    assert "skipped  7 of 300 (2.33 %): 6 overflow, 1 forward-nonfinite" in text
    assert re.search(r"scale +2,048 +[▁▂▃▄▅▆▇█]+  2,048 to 65,536, 5 reductions", text)
    assert re.search(r"loss +1 +█[▁▂▃▄▅▆▇█]+▁+  from 4, 1 NaN", text)
    assert "lost     1.25 % of gradient elements rounded to zero" in text
    assert "inf/NaN in 6 of 30 records" in text
    assert "floor 2^-24" in text and "ceiling 2^16" in text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal(facts, width):
    runs = [facts(name="one", planned=300), facts(name="two-with-a-rather-long-name-of-its-own", plan="bf16")]
    for shown in (runs[:1], runs):
        lines = draw_runs(shown, width=width).plain.splitlines()
        assert max(map(len, lines)) <= width


@pytest.mark.parametrize("height", [10, 14, 20, 40])
def test_one_run_is_no_higher_than_the_terminal(facts, height):
    run = facts(planned=300, layers=tuple(f"layer.{i}" for i in range(30)))
    num = len(draw_runs([run], width=100, height=height).plain.splitlines())
    assert num <= height
    assert num == (8 if height == 10 else min(height, 21))  # and it uses the room it has


def test_several_runs_are_brief(facts):
    text = draw_runs([facts(name="a"), facts(name="b", skips=False)], width=100).plain
    assert "nearest  head.weight · ≥ 2.0 doublings · inf/NaN in 6 of 30 records" in text
    assert "skipped  none of 300 steps · scale 65,536" in text
    assert "headroom in" not in text


def test_a_terminal_without_unicode_gets_ascii(facts):
    run = facts(name="run", layers=("körper.weight", "b"))
    assert not draw_runs([run], width=100).plain.isascii()
    text = draw_runs([run], width=100, plain=True).plain
    assert text.isascii()
    assert "unknown: norm 1x max" in text


def test_a_name_cannot_move_the_cursor(facts):
    text = draw_runs([facts(layers=("a\x1b[2Jb", f"{EVIL}\r\n"), stop="\x1b]0;title\x07")], width=100).plain
    assert "\x1b" not in text and "\r" not in text and "\x07" not in text


def test_an_empty_ledger_is_shown(tmp_path):
    progress = Progress(tmp_path)
    progress.add(Mark("end", 1.0))
    run = gather(progress, name="empty", now=1.0)
    assert "no step yet" in draw_runs([run], width=80).plain
    assert curves_of([run]) is None
    assert run.as_json()["attempted"] == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (59.7, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (90_061, "1 d 1 h"),
        (None, "—"),
        (math.inf, "—"),
    ],
)
def test_times_are_short(seconds, text):
    assert show_seconds(seconds) == text


def test_a_share_is_never_rounded_to_none_or_all():
    assert show_percent(1e-9) == "< 0.01 %"
    assert show_percent(0.99999) == "99.99 %"
    assert show_percent(0.0) == "0 %" and show_percent(1.0) == "100.00 %"


def test_a_spark_goes_from_the_lowest_to_the_highest_and_has_gaps():
    assert spark([1.0, 2.0, 3.0, 4.0], 4, steps="abcd") == "abcd"
    assert spark([1.0, None, 4.0], 3, steps="abcd") == "a d"
    assert spark([1.0] * 100, 10, steps="abcd") == "a" * 10
    assert spark([0.0, 0.0, 8.0, 8.0], 2, steps="abcd") == "ad"
    assert spark([], 10, steps="abcd") == ""
    assert spark([None, None], 10, steps="abcd") == "  "


def test_a_scale_that_never_moved_is_said_to(facts):
    run = facts(skips=False)
    assert scale_of(run) == "never moved"
    assert skips_of(run) == "none of 300 steps"
    assert headroom_of(run.layers[-1]) == "≥ 2.0 doublings"


def test_the_curves_hold_what_the_steps_hold(facts):
    data = curves_of([facts()])
    run = data["runs"][0]
    assert run["steps"] == list(range(1, 301)) and data["perPoint"] == 1
    assert run["loss"][0] == 4.0 and run["loss"][74] is None
    assert run["nonfinite"] == [[74, 1]]
    assert run["skips"][0] == [49, 1, "1 overflow"] and len(run["skips"]) == 7
    assert run["norm"][49] is None and run["norm"][0] == 1.5
    assert run["marks"] == [[120, "rollback"]]


def test_a_long_run_has_fewer_points_and_all_of_its_skips(facts):
    data = curves_of([facts(steps=3000, layers=())])
    run = data["runs"][0]
    assert data["perPoint"] == 4 and len(run["steps"]) == 750
    assert sum(count for _, count, _ in run["skips"]) == 61
    assert run["lossLow"][0] < run["loss"][0] < run["lossHigh"][0]
