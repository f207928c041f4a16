"""watch: the events of a loop at their lines, the loop unchanged, and nothing left patched."""

import inspect
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from floatline.probe.watch import events
from floatline.probe.watch.watch import watch

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
OWNERS = (
    nn.Module,
    Optimizer,
    torch.amp.GradScaler,
    torch.amp.autocast_mode.autocast,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.SequentialLR,
    torch.Tensor,
    torch,
    torch.linalg,
    torch.autograd,
    torch.distributed,
    clip_grad,
)


def loop(steps=3, init_scale=2.0**10, factor=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(X).float().pow(2).mean() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    return model


def everything():
    """Every attribute that a patch could have replaced, and the number of global hooks."""
    attributes = {(owner, name): value for owner in OWNERS for name, value in vars(owner).items()}
    return attributes, len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)


def test_a_step_shows_its_calls_in_order():
    with watch() as seen:
        loop()
    kinds = [type(event) for event in seen.events if event.step == 1]
    assert kinds == [
        events.ClearEvent,
        events.AutocastEvent,
        events.ForwardEvent,
        events.ScaleEvent,
        events.BackwardEvent,
        events.UnscaleEvent,
        events.ScalerStepEvent,
        events.StepEvent,
        events.ScaleUpdateEvent,
        events.SchedulerEvent,
    ]


def test_events_have_the_lines_of_the_user():
    with watch() as seen:
        loop()
    lines, first = inspect.getsourcelines(loop)
    for event in seen.events:
        assert event.file == __file__
        assert event.spot.function == "loop"
    code = {type(event): lines[event.line - first] for event in seen.events}
    assert "optimizer.zero_grad()" in code[events.ClearEvent]
    assert "model(X)" in code[events.ForwardEvent]
    assert ".backward()" in code[events.BackwardEvent]
    assert "scaler.step(optimizer)" in code[events.StepEvent]
    assert "scheduler.step()" in code[events.SchedulerEvent]
    assert "torch.optim.SGD" in code[events.NewOptimizerEvent]


def test_the_loop_computes_what_it_computes_alone():
    alone = loop()
    with watch():
        watched = loop()
    for one, other in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_left_patched():
    before = everything()
    with watch():
        loop()
    assert everything() == before
    with pytest.raises(ZeroDivisionError), watch():
        raise ZeroDivisionError
    assert everything() == before


def test_the_check_above_can_fail():
    before = everything()
    with watch():
        loop()
        assert everything() != before


def test_losses_are_without_the_scale():
    with watch() as seen:
        loop(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(X).float().pow(2).mean()
    (event,) = [event for event in seen.events if isinstance(event, events.BackwardEvent)]
    assert event.loss == pytest.approx(float(loss.detach()))
    assert event.factor == 2.0**10


def test_a_skipped_step_is_told_from_an_applied_one():
    with watch() as seen:
        loop(3, init_scale=2.0**40, factor=1e3)
        loop(3)
    applied = [event.applied for event in seen.events if isinstance(event, events.ScalerStepEvent)]
    assert applied == [False, False, False, True, True, True]


def test_a_norm_of_scaled_gradients_is_an_event_and_of_true_ones_is_none():
    model = nn.Linear(4, 1)
    with watch() as seen:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(X).mean()).backward()
        model.weight.grad.norm()
        scaler.unscale_(optimizer)
        model.weight.grad.norm()
    assert [event.factor for event in seen.events if isinstance(event, events.NormEvent)] == [65536.0]


def test_steps_are_counted_with_and_without_clearing_first():
    def train(order):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            if order == "first":
                optimizer.zero_grad()
            model(X).mean().backward()
            model(X).mean().backward()  # two micro-batches are one step
            if order != "skipped":
                optimizer.step()
            if order != "first":
                optimizer.zero_grad()

    for order in ("first", "last", "skipped"):
        with watch() as seen:
            train(order)
        passes = [event for event in seen.events if isinstance(event, events.BackwardEvent)]
        assert [event.step for event in passes] == [0, 0, 1, 1, 2, 2], order


def test_weights_that_stand_still_and_gradients_that_are_missing_are_seen():
    with watch() as seen:
        model, idle = nn.Linear(4, 1), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr) for m, lr in ((model, 0.1), (model, 0.0), (idle, 0.1))]
        model(X).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    steps = [event for event in seen.events if isinstance(event, events.StepEvent)]
    assert [step.moved for step in steps] == [True, False, False]
    assert [step.num_without_gradient for step in steps] == [0, 0, 2]


@pytest.mark.parametrize("light", [True, False])
def test_a_scaler_that_has_come_down_to_zero_does_not_end_the_script(light):
    scaler = torch.amp.GradScaler("cpu", init_scale=1e-44)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(light=light) as seen:
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(model(X).mean() * math.nan).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 0.0
    passes = [event for event in seen.events if isinstance(event, events.BackwardEvent)]
    assert len(passes) == 6 and all(math.isnan(float(event.loss)) for event in passes)
