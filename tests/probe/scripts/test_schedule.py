"""Schedule: which steps are recorded follows from their number alone; a spent budget ends it, and is said."""

import time

import pytest
from tests.diagnosis.scripts.test_scripts import observe

from floatline.probe.scripts import recording
from floatline.probe.scripts.recording import BUDGET, Schedule

LOOP = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(40):
    opt.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    opt.step()
"""


def record(num_steps, spent=lambda step: 0.0):
    """The steps of a loop that are recorded, each asked about once before it is applied."""
    schedule, found = Schedule(), []
    for step in range(num_steps):
        if schedule.is_due(spent=spent(step)):
            found.append(step)
        schedule.num_applied += 1
    return found, schedule


def test_steps_0_2_and_9_are_recorded_and_then_four_times_as_many():
    found, schedule = record(3000)
    assert found == [0, 2, 9, 36, 144, 576, 2304]
    assert schedule.ended_at is None


@pytest.mark.parametrize("seconds", [0.0, 1.0, BUDGET / 2, BUDGET])
def test_time_within_the_budget_changes_nothing(seconds):
    assert record(200, lambda step: seconds)[0] == [0, 2, 9, 36, 144]


def test_steps_are_asked_about_more_than_once_and_recorded_once():
    schedule, found = Schedule(), []
    for step in range(40):
        found += [step for _ in range(3) if schedule.is_due(spent=0.0)]
        schedule.num_applied += 1
    assert found == [0, 2, 9, 36]


def test_steps_that_are_not_applied_do_not_count():
    schedule, found = Schedule(), []
    for step in range(40):
        if schedule.is_due(spent=0.0):
            found.append(step)
        schedule.num_applied += step >= 10  # a scaler left out the first ten
    assert found == [0, 12, 19]


def test_a_spent_budget_ends_it_for_good():
    found, schedule = record(200, lambda step: 1.01 * BUDGET if 20 < step < 50 else 0.0)
    assert found == [0, 2, 9]
    assert schedule.ended_at == 36


def test_a_loop_that_comes_late_is_recorded_at_once_and_then_later():
    schedule = Schedule()
    schedule.num_applied = 50
    assert schedule.is_due(spent=0.0)
    assert not schedule.is_due(spent=0.0)


def test_steps_are_counted_again_where_training_begins_again():
    schedule, found = Schedule(), []
    for step in range(70):
        found += [step] if schedule.is_due(spent=0.0) else []
        schedule.num_applied += 1
        if step == 20:
            schedule.begin_again()
    assert found == [0, 2, 9, 21, 23, 30, 57]


def observe_loop(folder, code=LOOP):
    script = folder / "train.py"
    script.write_text(code, encoding="utf-8")
    return observe(str(script))["notes"]


def test_a_script_is_recorded_by_the_schedule(tmp_path):
    notes = observe_loop(tmp_path)
    assert "4 of 40 steps recorded (step 0, 2, 9, 36)" in notes[0]
    assert len(notes) == 1


@pytest.mark.parametrize(("then", "steps"), [("bfloat16", "0, 2, 9, 36, 41, 43, 50, 77"), ("float32", "0, 2, 9, 36")])
def test_a_second_training_is_recorded_from_its_second_step_on_if_its_weights_are_of_another_format(
    then, steps, tmp_path
):
    code = f"{LOOP}net = net.to(torch.{then})\nopt = torch.optim.SGD(net.parameters(), lr=1e-3)\n"
    code += LOOP[LOOP.index("for step") :].replace("torch.randn(8, 4)", f"torch.randn(8, 4).to(torch.{then})")
    assert f"recorded (step {steps})" in observe_loop(tmp_path, code)[0]


def test_a_slow_clock_records_the_same_steps(tmp_path, monkeypatch):
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 0.5)  # half a second for each look at it
    assert "4 of 40 steps recorded (step 0, 2, 9, 36)" in observe_loop(tmp_path)[0]


def test_a_spent_budget_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "BUDGET", 0.0)  # any time is too much
    notes = observe_loop(tmp_path)
    assert "1 of 40 steps recorded (step 0)" in notes[0]
    assert any("by step 2: healthy steps after it were not looked into" in note for note in notes)
