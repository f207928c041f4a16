"""What cannot be trained is refused in one line that says what to do."""

import inspect

import pytest
import torch
from tests.optim.steps import make_params

from floatline import optim
from floatline.errors import FloatlineError, OptimizerError


def weight(dtype=torch.float16, **options):
    return torch.nn.Parameter(torch.ones(2, 3, dtype=dtype), **options)


CASES = {
    "update": (lambda: optim.AdamW([weight()], update="exakt"), r"'exakt' is not known\. Did you mean 'exact'"),
    "states": (lambda: optim.AdamW([weight()], states="int4"), r"'int4' are not known\. Did you mean 'int8'\?"),
    "no lr": (lambda: optim.AdamW([weight()], lr=None), r"lr is None\. Use a finite number from 0 up"),
    "words for lr": (lambda: optim.SGD([weight()], lr="1e-3"), r"lr is '1e-3'\. Use a finite number from 0 up"),
    "words for decay": (lambda: optim.Muon([weight()], weight_decay="a"), r"weight_decay is 'a'\. Use a finite"),
    "seed": (lambda: optim.AdamW([weight()], seed=-1), r"Seed -1 .* Use 0 to"),
    "nan lr": (lambda: optim.AdamW([weight()], lr=float("nan")), r"lr is nan\. Use a finite number from 0 up"),
    "negative lr": (lambda: optim.SGD([weight()], lr=-1e-3), r"lr is -0\.001\."),
    "infinite lr": (lambda: optim.Lion([weight()], lr=float("inf")), r"lr is inf\."),
    "tensor lr": (lambda: optim.AdamW([weight()], lr=torch.ones(2)), r"lr is a tensor of shape \(2,\)\. Use one"),
    "group lr": (lambda: optim.AdamW([{"params": [weight()], "lr": -1.0}]), r"lr is -1\.0"),
    "eps": (lambda: optim.AdamW([weight()], eps=-1e-8), r"eps is -1e-08"),
    "decay": (lambda: optim.AdamW([weight()], weight_decay=float("nan")), r"weight_decay is nan"),
    "betas": (lambda: optim.Adam([weight()], betas=(0.9, 1.0)), r"betas are \(0\.9, 1\.0\)"),
    "one beta": (lambda: optim.AdamW([weight()], betas=(0.9,)), r"betas are \(0\.9,\)\. Use two numbers from 0 up"),
    "three betas": (lambda: optim.Lion([weight()], betas=(0.9, 0.9, 0.9)), r"betas are \(0\.9, 0\.9, 0\.9\)\. Use two"),
    "a number for betas": (lambda: optim.Adam([weight()], betas=0.9), r"betas are 0\.9\. Use two numbers"),
    "betas of a group": (lambda: optim.Adam([{"params": [weight()], "betas": ()}]), r"betas are \(\)\. Use two"),
    "momentum": (lambda: optim.SGD([weight()], momentum=-0.9), r"momentum is -0\.9"),
    "nesterov": (lambda: optim.SGD([weight()], nesterov=True), r"nesterov=True with momentum 0\.0"),
    "amsgrad": (lambda: optim.AdamW([weight()], amsgrad=True), r"amsgrad=True is not supported\. Use amsgrad=False"),
    "differentiable": (
        lambda: optim.Lion([weight()], differentiable=True),
        r"differentiable=True is not supported\. Use differentiable=False",
    ),
    "integer": (
        lambda: optim.SGD([torch.ones(2, dtype=torch.int64)]),
        r"shape \(2,\) is torch\.int64\. Use float32, float16 or bfloat16",
    ),
    "float64": (lambda: optim.SGD([weight(torch.float64)]), r"is torch\.float64\. Use float32"),
    "complex": (lambda: optim.SGD([weight(torch.complex64)]), r"torch\.complex64\. Train torch\.view_as_real"),
    "not a leaf": (lambda: optim.SGD([weight() * 2]), r"is computed from others\. Pass the tensors"),
    "named": (lambda: optim.SGD([("head", weight(torch.float64))]), r"Parameter 'head' is torch\.float64"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_setting_is_refused(case):
    make, message = CASES[case]
    with pytest.raises(OptimizerError, match=message) as caught:
        make()
    assert isinstance(caught.value, FloatlineError)
    assert "\n" not in str(caught.value)


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = optim.AdamW([weight()])
    with pytest.raises(OptimizerError):
        optimizer.add_param_group({"params": [weight()], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


KINDS = {optim.AdamW: torch.optim.AdamW, optim.Adam: torch.optim.Adam, optim.SGD: torch.optim.SGD}
FLAGS = [{"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}, {"differentiable": False}]


def weights_after(kind, **options):
    params = make_params(torch.float32)
    optimizer = kind(params, lr=0.01, **options)
    for step in range(3):
        for param in params:
            param.grad = torch.full_like(param, 0.1 * (step + 1))
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize(
    ("kind", "flags"),
    [(kind, flags) for kind in (*KINDS, optim.Lion) for flags in FLAGS] + [(optim.Muon, flags) for flags in FLAGS[:4]],
)
def test_torchs_flags_are_taken_and_change_nothing(kind, flags):
    plain, without = weights_after(kind)
    params, given = weights_after(kind, **flags)
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
    assert given.state_dict()["param_groups"] == without.state_dict()["param_groups"]


def test_the_comparison_above_sees_a_setting_that_counts():
    plain, _ = weights_after(optim.AdamW)
    params, _ = weights_after(optim.AdamW, maximize=True)
    assert not all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_of_torchs_class_is_taken_here(kind):
    torchs = inspect.signature(KINDS[kind]).parameters.keys()
    assert torchs <= inspect.signature(kind).parameters.keys()


def test_adam_with_decoupled_decay_is_adamw():
    expected, _ = weights_after(optim.AdamW, weight_decay=0.1)
    params, _ = weights_after(optim.Adam, weight_decay=0.1, decoupled_weight_decay=True)
    coupled, _ = weights_after(optim.Adam, weight_decay=0.1)
    assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(params, coupled, strict=True))


def test_sparse_gradients_are_refused_before_anything_changes():
    table = torch.nn.Embedding(10, 4, sparse=True)
    other = weight(torch.float32)
    optimizer = optim.AdamW([other, table.weight])
    (table(torch.tensor([1, 2])).sum() + other.sum()).backward()
    before = other.detach().clone()
    with pytest.raises(OptimizerError, match=r"shape \(10, 4\) is sparse\. Use a dense one"):
        optimizer.step()
    assert torch.equal(before, other)


def test_good_settings_are_taken():
    for kind in (optim.AdamW, optim.Adam, optim.SGD, optim.Lion):
        for update in ("exact", "stochastic", "kahan"):
            for states in ("fp32", "bf16", "int8"):
                kind(make_params(torch.float16), lr=0.0, update=update, states=states, seed=2**64 - 1)


@pytest.mark.parametrize("option", ["scale", "clip_norm"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_scale_or_clip_norm_that_cannot_be_meant_is_refused_before_anything_changes(option, value):
    param = weight(torch.float32)
    param.grad = torch.ones_like(param)
    optimizer = optim.AdamW([param], lr=0.1)
    with pytest.raises(OptimizerError, match=f"{option} is .*above 0"):
        optimizer.step(**{option: value})
    assert (param == 1).all()


def test_an_infinite_clip_norm_only_measures():
    param = weight(torch.float32)
    param.grad = torch.ones_like(param)
    optimizer = optim.SGD([param], lr=1.0)
    optimizer.step(clip_norm=float("inf"))
    assert optimizer.decision.norm.item() == pytest.approx(6**0.5)
    assert (param == 0).all()
