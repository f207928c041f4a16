"""One seed of one arm: same start, same data order, same evaluation; what is changed on purpose, and nothing else."""

import math
import signal
from dataclasses import replace

import pytest
import torch
from tests.validation import tiny_lm

import floatline as fl
from floatline.guard.policy import DEFAULT
from floatline.plans.presets import resolve_plan
from floatline.training.placement import callable_from_cpu
from floatline.training.settings import shared_policy
from floatline.validation.running.jobs import Job
from floatline.validation.study import trained_arm
from floatline.validation.study.arms import PlanArm, absolute_target, plans_of, reference_plan
from floatline.validation.study.limits import Limits, checkpoints_of
from floatline.validation.study.preparation import Inspection, inspect_workload
from floatline.validation.study.trained_arm import nudge_weights, train_job


def job(name="fp32", plan="fp32", *, steps=24, batches=None, curve_of="metric") -> Job:
    return PlanArm(name, "tests/validation/tiny_lm.py", resolve_plan(plan), steps, batches, curve_of).job(0)


def run(name="fp32", plan="fp32", **options):
    return train_job(job(name, plan, **options), tiny_lm.build(0))


def test_the_same_arm_twice_is_the_same_to_the_last_bit():
    one, other = run(), run()
    assert (one.metric, one.curve, one.first_losses) == (other.metric, other.curve, other.first_losses)
    assert run("fp16-mixed", "fp16-mixed").first_losses != one.first_losses


def test_an_arm_says_what_it_did():
    one = run()
    assert (one.steps, one.applied, one.skipped, one.weights_changed, one.lost) == (24, 24, 0, True, False)
    assert len(one.first_losses) == 20 and one.start > one.metric
    assert [step for step, _ in one.curve] == list(checkpoints_of(24)) == [*range(2, 25, 2)]
    assert one.curve[-1] == (24, one.metric)


def test_evaluating_on_the_way_changes_nothing():
    by_metric, by_loss = run(), run(curve_of="loss")
    assert by_metric.metric == by_loss.metric and by_metric.first_losses == by_loss.first_losses
    assert by_loss.curve_of == "loss" and by_loss.curve[0] == (2, math.fsum(by_loss.first_losses[:2]) / 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_signal_that_ends_an_arm_is_heard_by_who_waits_for_it(number, monkeypatch):
    heard = []
    monkeypatch.setattr(trained_arm._Diary, "note", lambda *_: signal.raise_signal(number))
    before = signal.signal(number, lambda got, _: heard.append(got))
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        signal.signal(number, before)
    assert heard == [number]


def test_no_steps_leave_the_start():
    one = run(steps=0)
    assert one.metric == one.start
    assert (one.steps, one.applied, one.weights_changed) == (0, 0, False)


def test_fewer_batches_are_the_first_ones():
    few, all_of_them = run(batches=2), run()
    assert few.first_losses[:2] == all_of_them.first_losses[:2]
    assert few.first_losses[2] != all_of_them.first_losses[2]


def test_nudging_moves_every_weight_by_a_unit_or_two_in_the_last_place():
    model = tiny_lm.build(0).model
    before = [p.detach().clone() for p in model.parameters()]
    nudge_weights(model, seed=0)
    for old, new in zip(before, model.parameters(), strict=True):
        ulps = (old.view(torch.int32) - new.view(torch.int32)).abs()
        assert int(ulps[old != 0].min()) >= 1 and int(ulps.max()) <= 2


def test_the_nudged_arm_starts_next_to_fp32_and_is_not_fp32():
    one, nudged = run(), run("fp32-nudged")
    assert nudged.first_losses != one.first_losses
    assert nudged.metric == pytest.approx(one.metric, rel=1e-4)


def test_the_broken_arm_has_weights_in_fp8_and_loses_by_far():
    workload = tiny_lm.build(0)
    broken = train_job(job("broken"), workload)
    weights = torch.cat([p.detach().flatten() for p in workload.model.parameters()])
    assert torch.equal(weights, weights.to(torch.float8_e5m2).float())
    assert math.log(broken.metric / run().metric) > 0.02


def test_sixteen_bit_weights_are_evaluated_as_they_are():
    workload = tiny_lm.half(0)
    one = train_job(job("bf16-true", "bf16-true"), workload)
    assert {p.dtype for p in workload.model.parameters()} == {torch.bfloat16}
    model = workload.model.float()
    with torch.no_grad(), callable_from_cpu(model, next(model.parameters()).device):
        assert one.metric == workload.evaluate(model)


def test_an_arm_that_raises_is_an_error_and_one_without_a_value_too():
    failed = Job("x", 3, function=lambda seed: 1 / 0).run()
    assert (failed.arm, failed.seed, failed.error) == ("x", 3, "ZeroDivisionError: division by zero")
    assert "gave a int" in Job("x", 3, function=lambda seed: 7).run().error


def test_the_reference_clips_and_accumulates_as_the_candidates_do():
    plan = reference_plan(plans_of(["safe"]))
    assert (plan.name, plan.compute, plan.accumulate, plan.clip.max_norm) == ("fp32", "fp32", 2, 5.0)
    with pytest.raises(fl.FloatlineError, match="differ in clip, so that no one FP32 run fits both"):
        reference_plan(plans_of(["fp16-mixed", "balanced"]))


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([], "There is no candidate"),
        (["fp16-mixed", "16-mixed"], "Two candidates have the name 'fp16-mixed'"),
        ([("broken", None)], "name 'broken', which is an arm of every study"),
        ([("fp32", None)], "name 'fp32', which is an arm of every study"),
        (["fp17-mixed"], "Did you mean 'fp16-mixed'"),
    ],
)
def test_candidates_that_cannot_be_told_apart_are_refused(plans, message):
    with pytest.raises(fl.FloatlineError, match=message):
        plans_of(plans)


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        (Limits(), 200),
        (Limits(steps=7), 7),
        (Limits(epochs=3), 120),
        (Limits(epochs=3, batches=10), 30),
        (Limits(epochs=0), 0),
        (Limits(batches=0), 0),
        (Limits(steps=5, batches=0), 0),
    ],
)
def test_steps_follow_the_limits(limits, steps):
    assert limits.steps_of(40, 1) == steps


def test_a_long_pass_is_longer_than_200_steps():
    assert Limits().steps_of(900, 2) == 450


def test_steps_and_epochs_at_once_are_refused():
    with pytest.raises(fl.FloatlineError, match="both given"):
        Limits(steps=1, epochs=1)


def test_the_inspection_names_the_metric_and_a_costly_one_is_not_taken_on_the_way():
    asked = {"num_batches": None, "plan": resolve_plan("fp32").model_dump(mode="json"), "seed": 0}
    seen = inspect_workload(tiny_lm.build(0), asked)
    assert (seen.metric, seen.num_batches) == ("val_loss", 40)
    assert Inspection("loss", 40, step_seconds=0.01, evaluate_seconds=0.05).curve_of(200) == "metric"
    assert Inspection("loss", 40, step_seconds=0.01, evaluate_seconds=0.50).curve_of(200) == "loss"


def test_a_file_is_found_from_anywhere_and_a_module_stays():
    assert absolute_target("tests/validation/tiny_lm.py:half").endswith("/tests/validation/tiny_lm.py:half")
    assert absolute_target("tests/validation/tiny_lm.py:half").startswith("/")
    assert absolute_target("some.module:name") == "some.module:name"


def test_every_arm_trains_on_outliers_unless_the_workload_asks_otherwise():
    workload, calls = tiny_lm.build(0), 0

    def loss_fn(*arguments):  # one batch whose gradient is a million times as large
        nonlocal calls
        calls += 1
        return workload.loss_fn(*arguments) * (1e6 if calls == 70 else 1.0)

    skipped: list[int] = []
    for policy in ({}, {"skip_outliers": True}):
        calls, guarded = 0, replace(workload, loss_fn=loss_fn, policy=policy)
        assert shared_policy(guarded) == replace(DEFAULT, **policy)
        skipped.append(train_job(job(steps=80, curve_of="loss"), guarded).skipped)
    assert skipped == [0, 1]
