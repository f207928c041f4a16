"""Holdings: what a model and its optimizers hold, by kind, layer group and format, and in one line."""

import pytest
import torch
from torch import nn

from floatline.precision.holding import describe_holdings, formats_of
from floatline.precision.live_holdings import find_holdings, name_weights


def trained(dtype, *, fp32_states=False):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(3, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    if fp32_states:
        for state in optimizer.state.values():
            state["master"] = torch.empty(0)
    return model, optimizer


@pytest.mark.parametrize(
    ("dtype", "line"),
    [
        (torch.float32, "weights FP32, gradients FP32, states FP32, buffers FP32"),
        (torch.bfloat16, "weights BF16 without a master copy, gradients BF16, states BF16, buffers BF16"),
    ],
)
def test_one_line_tells_what_is_held(dtype, line):
    model, optimizer = trained(dtype)
    assert describe_holdings(find_holdings([model], [optimizer])) == line


def test_a_state_that_is_the_weight_with_more_bits_is_a_master_copy_by_any_name():
    model, optimizer = trained(torch.bfloat16)
    for parameter, state in optimizer.state.items():
        state["hugo"] = parameter.detach().float() * (1 + 2.0**-12)
    held = find_holdings([model], [optimizer])
    assert set(formats_of(held, "master")) == {"fp32"}
    assert "with a master copy in FP32" in describe_holdings(held)


def test_a_state_with_other_numbers_is_none():
    model, optimizer = trained(torch.bfloat16)
    for parameter, state in optimizer.state.items():
        state["hugo"] = parameter.detach().float() * 1.5
    assert not formats_of(find_holdings([model], [optimizer]), "master")


def test_frozen_weights_and_adapters_are_apart():
    model = nn.Module()
    model.base = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
    model.lora_A = nn.Linear(4, 2, bias=False)
    held = find_holdings([model])
    assert set(formats_of(held, "frozen")) == {"bf16"}
    assert set(formats_of(held, "weights", group="adapters")) == {"fp32"}


def test_buffers_that_gradients_are_added_to_are_told():
    model = nn.Linear(2, 2).to(torch.bfloat16)
    model.weight.main_grad = torch.zeros(2, 2)  # as Megatron has it
    assert set(formats_of(find_holdings([model]), "accumulation")) == {"fp32"}


def test_tied_weights_count_once():
    model = nn.Module()
    model.embed, model.lm_head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    model.lm_head.weight = model.embed.weight
    assert [weight.name for weight in name_weights([model]).values()] == ["embed.weight"]
