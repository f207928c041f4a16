"""A guard whose steps fail says so, once, and ends the run; what was found out about a failure comes first."""

import math

import pytest
import torch
from torch import nn

import floatline as fl
from floatline.ledger.progress import Progress
from floatline.report.run.facts import gather
from floatline.report.run.page import document_of
from floatline.report.run.terminal import draw_runs


def make(tmp_path=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    guard = fl.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="fp32", folder=tmp_path, **options)
    return model, guard


def train(model, guard, num, *, bad):
    for i in range(num):
        x = torch.randn(8, 4)
        guard.step(lambda x: model(x).square().mean(), x * math.nan if bad(i) else x)


def lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("floatline: ")]


def test_ten_failed_steps_in_a_row_are_a_line_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/home/me/train_it.py"])
    model, guard = make()
    train(model, guard, 40, bad=lambda i: 5 <= i < 30)
    (line,) = lines(capsys)
    assert "10 steps in a row failed, since step 6: forward-nonfinite" in line
    assert "first in 0 (Linear, float32)" in line
    assert line.endswith("To find the cause: floatline diagnose -- python train_it.py")
    assert guard.accounts.run.applied == 15


def test_a_norm_above_the_threshold_is_told_and_trained_on(tmp_path, capsys):
    model, guard = make(tmp_path / "run", policy=fl.Policy(warn_norm_above=100.0))
    for size in (1.0, 1e4, 1e4, 1.0, 1e4, math.nan, 1.0):
        guard.step(lambda x, size=size: model(x).mean() * size, torch.ones(8, 4))
    guard.close()
    (line,) = lines(capsys)
    assert "large gradient norm in step 2: " in line and "is above 100 (warn_norm_above); it is trained on" in line
    assert guard.accounts.run.applied == 6
    told = "".join(part.read_text() for part in (tmp_path / "run").glob("ledger-*.jsonl"))
    assert [f"norm in step {n}" in told for n in range(1, 8)] == [False, True, False, False, True, False, False]


def test_without_a_threshold_no_norm_is_told(capsys):
    model, guard = make()
    for size in (1.0, 1e4):
        guard.step(lambda x, size=size: model(x).mean() * size, torch.ones(8, 4))
    guard.close()
    assert lines(capsys) == []


def test_nine_are_not(capsys):
    model, guard = make()
    train(model, guard, 60, bad=lambda i: i % 10 != 9)
    assert lines(capsys) == []


def test_each_row_of_failures_has_its_line(capsys):
    model, guard = make()
    train(model, guard, 60, bad=lambda i: i % 20 < 15)
    assert len(lines(capsys)) == 3


def test_two_hundred_failed_steps_in_a_row_stop_the_run():
    model, guard = make()
    with pytest.raises(fl.GuardStop, match="200 steps in a row were skipped, since step 31"):
        train(model, guard, 400, bad=lambda i: i >= 30)
    assert guard.attempts == 230


def test_a_policy_without_an_end_goes_on():
    model, guard = make(policy=fl.Policy(most_bad=None))
    train(model, guard, 230, bad=lambda i: True)
    assert guard.attempts == 230


def test_a_diagnosis_is_a_line_when_it_is_made_and_the_advice_of_the_stop(capsys, tmp_path):
    words = "bad-input-data: the batch holds NaN"
    model, guard = make(tmp_path, on_failure=lambda failed: words, policy=fl.Policy(most_bad=3))
    with pytest.raises(fl.GuardStop) as stop:
        train(model, guard, 9, bad=lambda i: i >= 4)
    said = lines(capsys)
    assert said[0] == "floatline: diagnosis of step 5: bad-input-data: the batch holds NaN"
    assert "The diagnosis of step 7: bad-input-data: the batch holds NaN. State: " in str(stop.value)
    assert "raise most_bad" not in str(stop.value)
    guard.close()


def test_a_diagnosis_that_is_made_again_is_one_line_and_the_last_one_is_the_stops(capsys):
    words = iter(["first", "second", "first", "first"])
    model, guard = make(on_failure=lambda failed: next(words), policy=fl.Policy(most_bad=4))
    with pytest.raises(fl.GuardStop, match="The diagnosis of step 8: first"):
        train(model, guard, 9, bad=lambda i: i >= 4)
    assert lines(capsys) == ["floatline: diagnosis of step 5: first", "floatline: diagnosis of step 6: second"]
    assert guard.run.diagnoses == ["diagnosis of step 6: second", "diagnosis of step 8: first"]


def test_what_names_no_cause_takes_the_place_of_no_advice_and_of_no_cause(capsys):
    unsure = ("no cause found: it passes", "not diagnosed: the budget is used up")
    for found, said in (
        ("bad-input-data: the batch holds NaN", "The diagnosis of step 5: bad-input"),
        ("", "raise most_bad"),
    ):
        words = iter([found, *unsure] if found else unsure)
        policy = fl.Policy(most_bad=4, warn_after=3)
        model, guard = make(on_failure=lambda failed, words=words: next(words, None), policy=policy)
        with pytest.raises(fl.GuardStop, match=said) as stop:
            train(model, guard, 9, bad=lambda i: i >= 4)
        assert "budget" not in str(stop.value)
        (row,) = [line for line in lines(capsys) if "in a row failed" in line]
        assert ("bad-input-data" if found else "To find the cause") in row


def test_without_a_diagnosis_the_stop_gives_the_usual_advice():
    model, guard = make(policy=fl.Policy(most_bad=3))
    with pytest.raises(fl.GuardStop, match="raise most_bad"):
        train(model, guard, 9, bad=lambda i: i >= 4)


def test_the_diagnosis_comes_first_where_a_run_is_watched(tmp_path):
    words = "exp-overflow at train.py:7"
    model, guard = make(tmp_path / "run", on_failure=lambda failed: words, policy=fl.Policy(most_bad=3))
    with pytest.raises(fl.GuardStop):
        train(model, guard, 9, bad=lambda i: i >= 4)
    guard.close()
    progress = Progress(tmp_path / "run")
    progress.update()
    run = gather(progress, name="run", now=progress.last_time)
    text = draw_runs([run], width=100).plain.splitlines()
    cause = next(i for i, line in enumerate(text) if "exp-overflow at train.py:7" in line)
    assert cause < next(i for i, line in enumerate(text) if line.startswith("loss"))
    assert "exp-overflow" in document_of([run])[0].reason
    assert "exp-overflow" in document_of([run, run])[0].flags[0]


def test_the_header_says_what_the_run_starts_with(tmp_path):
    _, guard = make(tmp_path)
    guard.close()
    line = fl.Ledger.read(tmp_path).header.metadata["manifest"]
    assert line == guard.manifest == "weights FP32; SGD; computes in FP32"


@pytest.mark.parametrize(
    ("kind", "said"),
    [(torch.optim.AdamW, "weights BF16 without a master copy"), (fl.optim.AdamW, "weights BF16 with exact updates")],
)
def test_the_header_tells_whether_16_bit_weights_keep_what_they_drop(tmp_path, kind, said):
    model = nn.Linear(4, 1).to(torch.bfloat16)
    with fl.Guard(model, kind(model.parameters(), lr=0.1), plan="bf16-true", folder=tmp_path):
        pass
    assert fl.Ledger.read(tmp_path).header.metadata["manifest"].startswith(said)
