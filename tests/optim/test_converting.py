"""Converting an optimizer: the same steps, with another update of 16-bit weights."""

import pytest
import torch
from torch import nn

import floatline as fl
from floatline.errors import OptimizerError
from floatline.optim.rules import UpdateName as OptimUpdateName
from floatline.plans.plan import UpdateName

KINDS = [
    (torch.optim.AdamW, fl.optim.AdamW, {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}),
    (torch.optim.Adam, fl.optim.Adam, {"lr": 0.03, "weight_decay": 0.1}),
    (torch.optim.SGD, fl.optim.SGD, {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]


def weights(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(7, 5).to(dtype)), nn.Parameter(torch.randn(5).to(dtype))]


def groups(params):
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.001, "weight_decay": 0.0, "name": "bias"}]


def train(params, optimizer, steps=3):
    for step in range(steps):
        for i, param in enumerate(params):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + i)).to(
                param.dtype
            )
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize(("kind", "own", "options"), KINDS)
def test_fp32_weights_are_trained_bit_for_bit_alike(kind, own, options):
    theirs, ours = weights(), weights()
    expected = train(theirs, kind(groups(theirs), foreach=True, **options))
    converted = fl.optim.convert(kind(groups(ours), **options), update="exact")
    assert type(converted) is own
    assert [group["lr"] for group in converted.param_groups] == [0.03, 0.001]
    assert converted.param_groups[1]["name"] == "bias"
    assert all(torch.equal(a, b) for a, b in zip(train(ours, converted), expected, strict=True))


def test_hooks_of_its_steps_listen_to_the_new_one_until_they_are_removed():
    params, heard = weights(torch.bfloat16), []
    optimizer = torch.optim.AdamW(params, lr=0.5)
    before = optimizer.register_step_pre_hook(lambda *_: heard.append("before"))

    def halve(stepped, *_):
        heard.append(stepped)
        stepped.param_groups[0]["lr"] /= 2

    optimizer.register_step_post_hook(halve)
    converted = fl.optim.convert(optimizer, update="exact")
    train(params, converted, steps=2)
    assert heard == ["before", converted, "before", converted]
    assert converted.param_groups[0]["lr"] == 0.125
    before.remove()
    train(params, converted, steps=1)
    assert heard[4:] == [converted]


@pytest.mark.parametrize(("kind", "own", "options"), KINDS)
def test_states_are_carried_over(kind, own, options):
    theirs, ours = weights(), weights()
    expected = train(theirs, kind(groups(theirs), foreach=True, **options), steps=4)
    optimizer = kind(groups(ours), foreach=True, **options)
    train(ours, optimizer, steps=2)
    converted = fl.optim.convert(optimizer, update="exact")
    for step in range(2, 4):
        for i, param in enumerate(ours):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + i))
        converted.step()
    assert all(torch.equal(a.detach(), b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("update", ["exact", "kahan", "stochastic"])
def test_small_updates_of_16_bit_weights_arrive(update):
    param = nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
    plain = nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
    converted = fl.optim.convert(torch.optim.SGD([param], lr=1e-4), update=update)
    rounding = torch.optim.SGD([plain], lr=1e-4)
    for _ in range(100):
        param.grad, plain.grad = torch.ones_like(param), torch.ones_like(plain)
        converted.step()
        rounding.step()
    assert converted.update == update
    assert plain.mean() == 1.0
    assert abs(param.detach().float().mean().item() - 0.99) < 0.003


def test_ours_can_be_converted_too():
    optimizer = fl.optim.Lion(weights(), lr=0.5, update="kahan", states="bf16", seed=7)
    converted = fl.optim.convert(optimizer, update="stochastic")
    assert (type(converted), converted.update, converted.states, converted.seed) == (
        fl.optim.Lion, "stochastic", "bf16", 7
    )  # fmt: skip
    assert converted.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.Adagrad, type("Mine", (torch.optim.SGD,), {})])
def test_others_have_no_counterpart(make):
    with pytest.raises(OptimizerError, match=r"has no counterpart with update='kahan'\. Use AdamW, Adam, SGD"):
        fl.optim.convert(make(weights(), lr=0.1), update="kahan")


def test_amsgrad_has_none_either():
    with pytest.raises(OptimizerError, match="amsgrad has no counterpart"):
        fl.optim.convert(torch.optim.AdamW(weights(), amsgrad=True), update="exact")


def test_a_plan_knows_the_same_updates():
    assert UpdateName == OptimUpdateName
