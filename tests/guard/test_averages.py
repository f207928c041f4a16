"""Averages of weights: in float32, of the weights that are being trained, and untouched by skipped steps."""

import math

import pytest
import torch
from torch import nn

import floatline as fl
from floatline.errors import GuardError
from floatline.guard.averages import Average

DECAY = 0.9


def make(dtype):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    return model, fl.optim.SGD(model.parameters(), lr=1e-4)


def step(model, optimizer):
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_average_follows_the_float32_weights_that_are_trained(dtype):
    model, optimizer = make(dtype)
    step(model, optimizer)
    average = Average(model, optimizer, DECAY)
    expected = {name: value.double() for name, value in optimizer.master_state_dict(model).items()}
    for _ in range(20):
        step(model, optimizer)
        average.update(torch.tensor(True))
        for name, value in optimizer.master_state_dict(model).items():
            expected[name] += (1 - DECAY) * (value.double() - expected[name])
    for name, value in average.tensors.items():
        assert value.dtype == torch.float32
        # A float32 average of numbers below 1 is rounded once a step; 16-bit weights alone would be 1e-3 away.
        torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=20 * 2.0**-24)


def test_a_skipped_step_keeps_every_bit_of_it_whatever_the_weights_are():
    model, optimizer = make(torch.float32)
    average = Average(model, optimizer, DECAY)
    before = {name: value.clone() for name, value in average.tensors.items()}
    with torch.no_grad():
        model.weight.fill_(math.nan)
    average.update(torch.tensor(False))
    assert all(torch.equal(value, before[name]) for name, value in average.tensors.items())
    average.update(torch.tensor(True))
    assert average.tensors["weight"].isnan().all()


def test_it_is_written_into_a_model_in_its_own_dtype():
    model, optimizer = make(torch.float32)
    average = Average(model, optimizer, DECAY)
    other = nn.Linear(4, 3).half()
    average.copy_to(other)
    assert torch.equal(other.weight, average.tensors["weight"].half())


@pytest.mark.parametrize("decay", [1.0, -0.1, math.nan, True])
def test_a_decay_that_is_no_share_is_refused(decay):
    with pytest.raises(GuardError, match="Give a number from 0 to below 1"):
        Average(*make(torch.float32), decay)
