"""A script under plans, over seeds: both arms are the same file, and no log format is needed."""

import json
import math
import sys

import pytest
from tests.slow import slow
from tests.validation.scripts import write_script

from floatline.errors import ComparisonError, TargetError
from floatline.plans.presets import resolve_plan
from floatline.validation.script_study import validate_script
from floatline.validation.study.script_arms import ScriptArm, count_late, is_expression, run_job, run_script
from floatline.validation.study.study import Silence


def command(path, *words):
    return [sys.executable, str(path), *words]


def arm(folder, plan="fp16-mixed", **fields):
    words = tuple(fields.pop("words", command(folder / "train.py", "--seed", "{seed}")))
    return ScriptArm("arm", words, None if plan is None else resolve_plan(plan), folder / "study", **fields)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@slow
def test_the_metric_is_the_loss_that_goes_backward_over_the_last_tenth_of_the_steps(folder):
    write_script(folder)
    run = run_job(arm(folder).job(3))
    rows = [json.loads(line) for line in (folder / "study/scripts/arm/3/losses.jsonl").open()]
    losses = [row["loss"] for row in rows]
    assert run.metric == sum(losses[-4:]) / 4
    assert (run.steps, run.applied, run.curve_of) == (40, sum(row["applied"] for row in rows), "loss")
    assert run.curve[-1] == (40, sum(losses[-2:]) / 2)


@slow
def test_what_a_script_writes_in_a_study_leaves_its_own_files_alone(folder):
    write_script(folder)
    (folder / "model.pt").write_bytes(b"mine")
    result = run_script(arm(folder).job(0))
    assert not result.error
    assert (folder / "model.pt").read_bytes() == b"mine"
    assert list(result.folder.rglob("model.pt"))


@slow
def test_an_expression_finds_the_metric_in_what_the_script_prints(folder):
    write_script(folder)
    run = run_job(arm(folder, metric=r"val loss (?P<value>[0-9.]+)", steps=5).job(0))
    printed = (folder / "study/scripts/arm/0/stdout.txt").read_text().splitlines()
    assert f"{run.metric:.4f}" == printed[-1].split()[-1]
    assert run.curve_of == "metric"
    assert len(run.curve) == len(printed)


@slow
def test_an_expression_that_matches_nothing_is_told_with_the_last_line(folder):
    write_script(folder)
    with pytest.raises(ComparisonError, match=r"matches nothing that the script prints. Its last line is 'step"):
        run_job(arm(folder, metric="accuracy ([0-9.]+)", steps=2).job(0))


def test_an_expression_needs_a_group_and_must_compile():
    assert is_expression("val (loss)")
    assert not is_expression("val/loss")
    with pytest.raises(ComparisonError, match="is no regular expression"):
        is_expression("val loss (")


@slow
def test_a_script_that_raises_is_a_run_with_an_error(folder):
    write_script(folder, loss="model(x).no_such_thing")
    run = run_job(arm(folder).job(0))
    assert math.isnan(run.metric)
    assert "AttributeError" in run.error


@slow
def test_seeds_reach_a_script_that_takes_none(folder):
    write_script(folder)
    first, same, other = (
        run_script(arm(folder, words=command(folder / "train.py"), steps=2).job(seed)) for seed in (0, 0, 1)
    )
    assert first.losses == same.losses != other.losses


@pytest.mark.parametrize(
    ("skipped", "num", "late"),
    [
        ((0, 1, 2), 60, 0),
        ((0, 1, 2, 30), 60, 1),
        ((0, 5, 12, 25), 60, 1),
        ((0, 1, 2), 5, 3),
        ((), 5, 0),
        ((40,), 60, 1),
    ],
)
def test_a_search_for_a_scale_at_the_start_is_no_skipped_update(skipped, num, late):
    assert count_late(skipped, num) == late


class Heard(Silence):
    """What a study says before its first run is done."""

    def __init__(self):
        self.said = []

    def plan(self, text):
        self.said.append(text)


@slow
def test_a_script_that_seeds_itself_is_told_where_and_what_to_do_after_a_line_on_what_is_looked_at(folder):
    path = write_script(folder)
    path.write_text(path.read_text().replace("if args.seed is not None:", "if True:").replace("(args.seed)", "(1337)"))
    heard = Heard()
    with pytest.raises(ComparisonError, match=r"seeds itself: train\.py:\d+: 1337\. Put \{seed\} where"):
        validate_script(command(path), ["fp16-mixed"], folder="study", watcher=heard)
    assert heard.said == ["looking at the script's first steps in FP32, with seeds 0 and 1"]


def test_a_command_that_is_no_script_is_refused_before_anything_runs(folder):
    heard = Heard()
    with pytest.raises(TargetError, match="There is no script 'nowhere.py'"):
        validate_script([sys.executable, "nowhere.py"], ["fp16-mixed"], folder="study", watcher=heard)
    assert not (folder / "study").exists() and heard.said == []


@slow
def test_a_plan_that_trains_as_fp32_does_passes_and_one_that_does_not_fails(folder):
    words = command(write_script(folder), "--seed", "{seed}")
    good = validate_script(words, ["bf16-mixed"], margins=(0.3, 0.6), max_seeds=3, folder="good")
    assert good.verdict == "PASS"
    assert (folder / "good/validation.json").is_file()
    # Below FP16's smallest number the loss is flat.
    write_script(folder, loss="(nn.functional.mse_loss(model(x), y).half() * 1e-9).float() * 1e9")
    bad = validate_script(words, ["fp16-mixed"], max_seeds=3, folder="bad")
    assert bad.verdict != "PASS"
