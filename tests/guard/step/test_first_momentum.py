"""A fused SGD whose first step is skipped begins with a momentum of 0, not with what was in memory."""

import math

import pytest
import torch
from torch import nn

import floatline as fl


@pytest.fixture
def old_memory(monkeypatch):
    """Memory that was used before, as the caching allocator of a GPU hands it out."""
    monkeypatch.setattr(torch, "empty_like", lambda t, *_, **__: torch.full_like(t, math.nan))


def make(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True, **options)


def batch(number):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


def by_guard(model, optimizer, *, bad):
    guard = fl.Guard(model, optimizer, plan="fp32")
    for i in range(6):
        guard.step(lambda x: model(x).square().mean(), batch(i) * (math.nan if i in bad else 1.0))


def by_scaler(model, optimizer, *, bad, scaler=None):
    scaler = scaler or fl.LossScaler("cpu", init_scale=2.0)
    for i in range(6):
        optimizer.zero_grad()
        scaler.scale(model(batch(i) * (math.nan if i in bad else 1.0)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.usefixtures("old_memory")
@pytest.mark.parametrize("train", [by_guard, by_scaler])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.1}])
def test_weights_stay_finite_where_the_first_step_is_skipped(train, options):
    model, optimizer = make(**options)
    train(model, optimizer, bad=(0, 1))
    assert model.weight.isfinite().all()


@pytest.mark.usefixtures("old_memory")
def test_with_dampening_a_guard_asks_the_host():
    model, optimizer = make(dampening=0.5)
    by_guard(model, optimizer, bad=(0, 1))
    assert model.weight.isfinite().all()


@pytest.mark.usefixtures("old_memory")
def test_torchs_own_scaler_loses_the_weights():
    model, optimizer = make()
    by_scaler(model, optimizer, bad=(0,), scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    assert model.weight.isnan().any()


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.1}])
def test_without_a_skip_every_bit_is_torchs(options):
    one, optimizer = make(**options)
    by_guard(one, optimizer, bad=())
    two, optimizer = make(**options)
    for i in range(6):
        optimizer.zero_grad()
        two(batch(i)).square().mean().backward()
        optimizer.step()
    assert torch.equal(one.weight, two.weight)
