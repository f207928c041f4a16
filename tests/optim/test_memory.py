"""The bytes that memory() reports are the bytes that are there."""

import pytest
import torch
from tests.optim.steps import HALVES, make_params, set_grads

from floatline import optim

SHAPES = [(64, 64), (1000,), (3,)]


def stepped(kind=optim.AdamW, dtype=torch.float16, **settings):
    params = make_params(dtype, shapes=SHAPES)
    optimizer = kind(params, **settings)
    set_grads(params)
    optimizer.step()
    return optimizer


def real_bytes(optimizer):
    """Storages, counted once each."""
    storages = {}
    for param in optimizer.param_groups[0]["params"]:
        for tensor in (param.detach(), param.grad, *optimizer.state[param].values()):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("update", ["exact", "stochastic", "kahan"])
def test_the_total_is_the_sum_of_the_storages(update, states):
    optimizer = stepped(update=update, states=states)
    assert optimizer.memory().total == real_bytes(optimizer)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2 + 2 + 8),
        ({"update": "kahan"}, 2 + 2 + 8),
        ({"update": "stochastic"}, 2 + 8),
        ({"states": "bf16"}, 2 + 2 + 4),
    ],
)
def test_bytes_of_a_parameter_without_its_gradient(settings, expected, dtype):
    per = stepped(dtype=dtype, **settings).memory().per_parameter
    assert per["gradients"] == 2
    assert sum(per.values()) - per["gradients"] - per["step"] == expected


def test_8_bit_states_take_a_quarter_and_their_scales():
    per = stepped(states="int8").memory().per_parameter
    assert per["exp_avg"] == per["exp_avg_sq"] == 1
    assert per["exp_avg_scale"] == per["exp_avg_sq_scale"] == 4 * (16 + 4 + 1) / 5099
    assert per["weights"] + per["remainder"] == 4


def test_sgd_without_momentum_keeps_no_state():
    parts = stepped(optim.SGD).memory().parts
    assert set(parts) == {"weights", "gradients", "remainder", "step"}
    assert "momentum_buffer" in stepped(optim.SGD, momentum=0.9).memory().parts


def test_float32_weights_have_no_remainder():
    assert "remainder" not in stepped(dtype=torch.float32).memory().parts


def test_before_the_first_step_there_are_no_states():
    params = make_params(torch.float16, shapes=SHAPES)
    memory = optim.AdamW(params).memory()
    assert memory.total == memory.parts["weights"] == 2 * memory.num_parameters


def test_the_table_shows_bytes_a_parameter():
    text = str(stepped().memory())
    assert "5,099 parameters" in text
    assert "remainder" in text
    assert "14.00 a parameter" in text
