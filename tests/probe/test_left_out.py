"""Steps that nobody looks at: what a loop did in them is noted all the same, in its order, and nothing else changes."""

import math

import pytest
import torch
from torch import nn

from floatline.probe import late, left_out, script_late, script_steps, watch_calls
from floatline.probe.script_steps import StepCapture
from floatline.probe.watch import watch

EACH, TOGETHER = math.inf, 0.0
STEPS = 120


@pytest.fixture(params=["far", "near"])
def place(request, monkeypatch):
    """Where the loop seems to run: on a GPU, or on a CPU."""
    monkeypatch.setattr(late, "is_far", lambda tensor: request.param == "far")
    return request.param


@pytest.fixture
def num_left_out(monkeypatch):
    """Steps of optimizers that were left out."""
    counts = [0]

    def count(seen, optimizer):
        done = left_out.leave_out_step(seen, optimizer)
        counts[0] += done
        return done

    monkeypatch.setattr(watch_calls, "leave_out_step", count)
    return counts


def plain(step, net, optimizers, scheduler):
    for optimizer in optimizers:
        optimizer.zero_grad()
    net(torch.full((2, 3), step / 50)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def scheduled(step, net, optimizers, scheduler):
    plain(step, net, optimizers, scheduler)
    scheduler.step()


def accumulated(step, net, optimizers, scheduler):
    for part in range(2):
        (net(torch.full((2, 3), step / 50 + part)).square().mean() / 2).backward()
    for optimizer in optimizers:
        optimizer.step()
    net.zero_grad()


def cleared_by_hand(step, net, optimizers, scheduler):
    for parameter in net.parameters():
        parameter.grad = None
    net(torch.full((2, 3), step / 50)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def saved(step, net, optimizers, scheduler):
    optimizers[0].zero_grad()
    loss = net(torch.full((2, 3), step / 50)).square().mean()
    if step % 7 == 0:
        net.state_dict()
    loss.backward()
    if step % 5 == 0:
        optimizers[0].state_dict()
    optimizers[0].step()
    if step % 9 == 0:
        with torch.no_grad():
            net(torch.ones(1, 3))


def of_many_numbers(step, net, optimizers, scheduler):
    optimizers[0].zero_grad()
    made = net(torch.full((2, 3), step / 50))
    torch.autograd.backward([made, made.sum()], [torch.ones_like(made), torch.ones(())])
    optimizers[0].step()


def in_autocast(step, net, optimizers, scheduler):
    optimizers[0].zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=step % 3 > 0):
        loss = net(torch.full((2, 3), step / 50)).square().mean()
    loss.backward()
    optimizers[0].step()


LOOPS = [plain, scheduled, accumulated, cleared_by_hand, saved, of_many_numbers, in_autocast]


def run(loop, share, monkeypatch, *, num_optimizers=1, size=3):
    """What was noted, the forward passes that are held, and the weights in the end."""
    monkeypatch.setattr(script_late, "_SHARE", share)
    monkeypatch.setattr(script_steps, "_NEAR", 16 if share == TOGETHER else 0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, size), nn.Linear(size, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in net]
    if num_optimizers == 1:
        optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda epoch: 1 / (1 + epoch))
    with watch(light=True) as seen:
        capture = StepCapture(seen)
        capture._schedule.due = 10**9
        seen.listener = capture
        for step in range(STEPS):
            loop(step, net, optimizers, scheduler)
        capture.finish()
    names = ("rates", "loss", "root", "create_graph")
    told = [(e.kind, e.step, e.line, *(e.data.get(name) for name in names)) for e in seen.events]
    held = [(f.event.step, f.args[0].tolist(), f.autocast) for f in capture._held.calls]
    return told, held, [p.tolist() for p in net.parameters()], capture


@pytest.mark.parametrize("num_optimizers", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_noted_is_the_same_whether_steps_are_left_out_or_not(
    loop, num_optimizers, monkeypatch, num_left_out, place
):
    all_told, last, weights, capture = run(loop, EACH, monkeypatch, num_optimizers=num_optimizers)
    assert num_left_out == [0]
    told, held, same_weights, other = run(loop, TOGETHER, monkeypatch, num_optimizers=num_optimizers)
    assert num_left_out[0] > STEPS // 4
    assert told == all_told
    assert weights == same_weights
    assert [one for one in held if one[0] == last[-1][0]][-1] == last[-1]
    assert len(held) > len(last) or place == "near"
    assert other._schedule.num_applied == capture._schedule.num_applied == STEPS
    assert other.errors == capture.errors == []


def test_large_inputs_are_not_held_for_steps_that_are_left_out(monkeypatch, num_left_out, place):
    def large(step, net, optimizers, scheduler):
        optimizers[0].zero_grad()
        net(torch.ones(2**20, 3)[:: 2**19]).sum().backward()
        optimizers[0].step()

    monkeypatch.setattr("floatline.probe.held_forwards._MOST_BYTES", 2 * 3 * 4 * 3)
    capture = run(large, TOGETHER, monkeypatch)[3]
    assert capture._late.num_together == (32 if place == "far" else 1)
    assert num_left_out == [0]
    assert len(capture._held.calls) == (3 if place == "far" else 2)


def test_from_the_first_call_of_a_scaler_on_nothing_is_left_out(monkeypatch, num_left_out, place):
    scaler = []

    def late_scaler(step, net, optimizers, scheduler):
        optimizers[0].zero_grad()
        loss = net(torch.full((2, 3), step / 50)).square().mean()
        if step == 100:
            scaler.append((torch.amp.GradScaler("cpu", init_scale=4.0), num_left_out[0]))
        if not scaler:
            loss.backward()
            optimizers[0].step()
            return
        scaler[0][0].scale(loss).backward()
        scaler[0][0].step(optimizers[0])
        scaler[0][0].update()

    told = run(late_scaler, TOGETHER, monkeypatch)[0]
    assert scaler[0][1] == num_left_out[0] > 0
    assert [row[1] for row in told if row[0] == "scaler-step"] == list(range(100, STEPS))
    assert [row[1] for row in told if row[0] == "backward"] == list(range(STEPS))


@pytest.mark.parametrize("bad", range(64, 80))
def test_a_loss_that_is_not_finite_is_dated_by_its_step(bad, monkeypatch, num_left_out, place):
    failed = []

    def fail(self, event, *_, **__):
        failed.append(event.step)

    def spoilt(step, net, optimizers, scheduler):
        optimizers[0].zero_grad()
        loss = net(torch.ones(2, 3)).square().mean()
        (loss * math.inf if step == bad else loss).backward()
        for parameter in net.parameters():
            parameter.grad.zero_()  # no weight tells
        optimizers[0].step()

    monkeypatch.setattr(StepCapture, "_fail_late" if place == "far" else "_fail", fail)
    run(spoilt, TOGETHER, monkeypatch)
    assert failed == [bad]
    assert num_left_out[0] > 0


@pytest.mark.parametrize("bad", range(66, 84))
def test_on_a_cpu_a_gradient_that_is_not_finite_is_found_before_the_weights_are_lost(bad, monkeypatch, num_left_out):
    def spoilt(step, net, optimizers, scheduler):
        plain(step, net, [], scheduler)
        if step == bad:
            net[0].bias.grad[0] = math.inf
        optimizers[0].step()
        optimizers[0].zero_grad()

    capture = run(spoilt, TOGETHER, monkeypatch)[3]
    assert num_left_out[0] > 0
    assert capture._failed_step == bad
    assert capture.errors == []  # no note that older weights had to do
    assert all(bool(copy.isfinite().all()) for copy in capture.before_failure.copies)
