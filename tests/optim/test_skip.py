"""A step is made wholly or not at all."""

import pytest
import torch
from tests.optim.steps import DTYPES, HALVES, make_params, same_bits, set_grads, snapshot

from floatline import optim

FORMS = [
    {"update": update, "states": states}
    for update in ("exact", "stochastic", "kahan")
    for states in ("fp32", "bf16", "int8")
]
KINDS = [optim.AdamW, optim.Adam, optim.Lion, optim.Muon, lambda p, **k: optim.SGD(p, momentum=0.9, **k)]


def started(dtype=torch.float16, kind=optim.AdamW, **settings):
    params = make_params(dtype)
    optimizer = kind(params, lr=1e-3, **settings)
    set_grads(params)
    optimizer.step()
    return params, optimizer


def plant(params, value):
    set_grads(params, step=5)
    params[1].grad[0, 0] = value


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_a_skipped_step_keeps_every_bit(settings, value):
    params, optimizer = started(**settings)
    plant(params, value)
    before = snapshot(optimizer)
    for options in ({"scale": 8.0}, {"clip_norm": 1.0}, {"skip": torch.tensor(False)}):
        optimizer.step(**options)
        assert not bool(optimizer.decision.applied)
        assert same_bits(before, snapshot(optimizer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_optimizer_skips(kind, dtype):
    params, optimizer = started(dtype, kind)
    plant(params, torch.nan)
    before = snapshot(optimizer)
    optimizer.step(clip_norm=1.0)
    assert same_bits(before, snapshot(optimizer))
    set_grads(params, step=6)
    optimizer.step(clip_norm=1.0)
    assert not same_bits(before, snapshot(optimizer))


@pytest.mark.parametrize("skip", [True, torch.tensor(True), torch.tensor([1.0])])
def test_the_skip_flag_keeps_every_bit(skip):
    params, optimizer = started()
    set_grads(params, step=5)
    before = snapshot(optimizer)
    optimizer.step(skip=skip)
    assert same_bits(before, snapshot(optimizer))
    optimizer.step(skip=False)
    assert not same_bits(before, snapshot(optimizer))


def test_torch_adamw_is_damaged_by_the_same_gradient():
    params = make_params(torch.float32)
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    set_grads(params)
    optimizer.step()
    plant(params, torch.nan)
    optimizer.step()
    assert params[1].isnan().any()


def test_a_plain_step_checks_nothing_as_in_torch():
    params, optimizer = started()
    plant(params, torch.nan)
    optimizer.step()
    assert optimizer.decision is None
    assert params[1].isnan().any()


def test_a_skipped_step_changes_no_later_one():
    """Random choices are keyed by the steps that were made, not by those that were tried."""
    results = []
    for skipped in (False, True):
        params, optimizer = started(torch.bfloat16, update="stochastic")
        if skipped:
            plant(params, torch.inf)
            optimizer.step(clip_norm=1.0)
        set_grads(params, step=6)
        optimizer.step(clip_norm=1.0)
        results.append(snapshot(optimizer))
    assert same_bits(*results)


def linear(dtype):
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8).to(dtype)


def loss_of(model, step):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return model(x.to(model.weight.dtype)).float().square().mean()


@pytest.mark.parametrize("dtype", HALVES)
def test_grad_scaler_trains_16_bit_weights(dtype):
    model = linear(dtype)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(60):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    assert scaler.get_scale() == 1024.0
    assert not hasattr(optimizer, "grad_scale")


def test_grad_scaler_refuses_16_bit_weights_with_torch_adamw():
    model = linear(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)


def test_grad_scaler_unscales_as_step_does():
    results = []
    for scaled in (False, True):
        model = linear(torch.float16)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if scaled:
                scaler.step(optimizer, clip_norm=0.3)
                scaler.update()
            else:
                optimizer.step(clip_norm=0.3)
        results.append(optimizer.master_state_dict(model))
    for name, tensor in results[0].items():
        assert torch.allclose(tensor, results[1][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1.0}])
def test_an_overflow_found_by_grad_scaler_keeps_every_bit(clip):
    model = linear(torch.float16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            model.weight.grad[0, 0] = torch.inf
        before = snapshot(optimizer)
        scaler.step(optimizer, **clip)
        scaler.update()
    assert same_bits(before, snapshot(optimizer))
    assert scaler.get_scale() == 32.0


def test_grad_scaler_may_unscale_float32_gradients_first():
    model = linear(torch.float32)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    start = model.weight.detach().clone()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    grad = model.weight.grad.clone()
    scaler.step(optimizer)
    assert torch.allclose(model.weight.detach(), start - grad)
