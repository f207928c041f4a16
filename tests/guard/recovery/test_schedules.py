"""Schedules: as many advances as applied steps, and cuts that end by themselves."""

import json

import pytest
import torch

from floatline.errors import GuardError
from floatline.guard.schedules import Schedules, check_rates


def make(*, late=False, lr=1.0, kind="exponential"):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)
    if kind == "exponential":
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    else:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()  # torch warns about a scheduler that moves before any step
    schedules = Schedules(optimizer, late=late)
    schedules.add(scheduler)
    return optimizer, scheduler, schedules


def run(schedules, outcomes, *, lag=0):
    """Attempts with their outcomes, learnt `lag` steps later."""
    waiting = []
    for applied in outcomes:
        schedules.attempt()
        waiting.append(applied)
        if len(waiting) > lag:
            schedules.learn(applied=waiting.pop(0))
    for applied in waiting:
        schedules.learn(applied=applied)


@pytest.mark.parametrize("late", [False, True])
def test_in_a_run_without_skips_every_rate_is_that_of_a_bare_loop(late):
    optimizer, _, schedules = make(late=late)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        schedules.attempt()
        schedules.learn(applied=True)
    assert rates == [1.0, 0.5, 0.25, 0.125, 0.0625]


def test_a_skipped_step_does_not_advance_where_nothing_is_late():
    _, scheduler, schedules = make()
    run(schedules, [True, False, False, True])
    assert scheduler.last_epoch == 2


def test_where_the_host_learns_late_the_debt_is_paid_by_standing_still():
    _, scheduler, schedules = make(late=True)
    run(schedules, [True, False, True, True, True, True, True], lag=3)
    assert scheduler.last_epoch == 6


def test_without_the_debt_it_would_be_one_too_many():
    _, scheduler, schedules = make(late=True)
    for _ in range(7):
        schedules.attempt()
    assert scheduler.last_epoch == 7


@pytest.mark.parametrize("kind", ["exponential", "lambda"])
def test_a_cut_lies_over_the_schedule_and_ends_after_its_steps(kind):
    optimizer, _, schedules = make(kind=kind)
    plain, _, other = make(kind=kind)
    schedules.cut(0.5, 3)
    ratios = []
    for _ in range(6):
        ratios.append(optimizer.param_groups[0]["lr"] / plain.param_groups[0]["lr"])
        run(schedules, [True])
        run(other, [True])
    assert ratios == [0.5, 0.5, 0.5, 1.0, 1.0, 1.0]


def test_skipped_steps_do_not_use_up_a_cut():
    optimizer, _, schedules = make()
    schedules.cut(0.5, 1)
    run(schedules, [False, False])
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_rate_that_is_a_tensor_is_cut_in_place():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(1.0))
    lr = optimizer.param_groups[0]["lr"]
    Schedules(optimizer, late=False).cut(0.5, 3)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.5


def test_state_goes_through_json():
    optimizer, scheduler, schedules = make(late=True)
    schedules.cut(0.5, 10)
    run(schedules, [True, False, True], lag=2)
    saved = json.loads(json.dumps(schedules.state_dict()))
    again, twin, others = make(late=True)
    others.load_state_dict(saved)
    run(schedules, [True] * 12)
    run(others, [True] * 12)
    assert twin.last_epoch == scheduler.last_epoch
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_foreign_scheduler_is_refused():
    _, _, schedules = make()
    _, other, _ = make()
    with pytest.raises(GuardError, match="same optimizer"):
        schedules.add(other)


def test_a_scheduler_that_follows_a_metric_is_refused():
    optimizer, _, schedules = make()
    with pytest.raises(GuardError, match="step\\(metric\\)"):
        schedules.add(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1.0])
def test_a_rate_that_would_write_nan_is_refused(lr):
    optimizer, _, _ = make()
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(GuardError, match="learning rate of group 0"):
        check_rates(optimizer)
