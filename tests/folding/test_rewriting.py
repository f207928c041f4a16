"""Rewriting: powers of two do not round, shifted weights round once, and what FP16 would spoil is known."""

import pytest
import torch
from torch import nn

from floatline.folding.rewriting import (
    WeightRewrite,
    half_copy,
    rewrite_model,
    rounded_parameters,
    shared_parameters,
    untie_parameters,
)


def layer(*values: float, dtype=torch.float32) -> nn.Module:
    model = nn.LayerNorm(len(values), bias=False, dtype=dtype)
    model.weight.data = torch.tensor(values, dtype=dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power", [-6, 5])
def test_powers_of_two_do_not_round_normal_numbers(dtype, power):
    model = nn.Linear(32, 32, bias=False)
    model.weight.data = (torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) + 0.01).to(dtype)
    before = model.weight.detach().double().clone()
    rewrite_model(model, WeightRewrite({"weight": power}, {}, {}))
    assert torch.equal(model.weight.double(), before * 2.0**power)


def test_a_power_that_leaves_the_normal_numbers_rounds():
    model = layer(2.0**-14 + 2.0**-24, dtype=torch.float16)
    rewrite_model(model, WeightRewrite({"weight": -1}, {}, {}))
    assert model.weight.double().item() != (2.0**-14 + 2.0**-24) / 2


def test_a_shifted_weight_is_rounded_once():
    model = layer(0.1, -0.25, 3.0)
    before = model.weight.detach().double().clone()
    rewrite_model(model, WeightRewrite({}, {"weight": (1.0, -4)}, {}))
    assert torch.equal(model.weight, ((1.0 + before) / 16 - 1.0).float())


def test_an_epsilon_is_scaled_and_torchs_default_is_known():
    model = nn.Sequential(nn.LayerNorm(2, eps=1e-5), nn.RMSNorm(2))
    rewrite_model(model, WeightRewrite({}, {}, {("0", "eps"): -6, ("1", "eps"): -6}))
    assert (model[0].eps, model[1].eps) == (1e-5 / 64, 2.0**-29)


def test_a_shifted_weight_that_fp16_would_spoil_is_kept_in_fp32():
    rewrite = WeightRewrite({}, {"weight": (1.0, -5)}, {})
    small, large = layer(0.1, 0.2), layer(63.0, 95.0)
    for model in (small, large):
        rewrite_model(model, rewrite)
    assert rounded_parameters(small, rewrite) == ("weight",)
    assert rounded_parameters(large, rewrite) == ()  # 1 + w is 2 and 3, which FP16 holds
    assert half_copy(small, torch.float16, ("weight",)).weight.dtype == torch.float32
    assert half_copy(small, torch.float16).weight.dtype == torch.float16


def test_shared_weights_become_several_and_a_config_says_so_no_more():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    model.config = type("Config", (), {"tie_word_embeddings": True})()
    assert shared_parameters(model) == {"0.weight"}
    assert untie_parameters(model) == ("1.weight",)
    assert model[1].weight is not model[0].weight
    assert torch.equal(model[1].weight, model[0].weight)
    assert model.config.tie_word_embeddings is False
    assert (shared_parameters(model), untie_parameters(model)) == (set(), ())
