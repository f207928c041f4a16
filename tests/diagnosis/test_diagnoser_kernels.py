"""A kernel that is wrong in 16 bits is what the library's diagnoser names of a failed step, not what comes of it."""

import pytest
import torch
from tests.marks import judges_kernels
from torch import nn

from floatline.diagnosis.detectors.kernels import find_wrong_kernels
from floatline.diagnosis.diagnoser import find_in_step
from floatline.probe.trace.recorder import Recorder

pytestmark = judges_kernels


@torch.library.custom_op("diagnosed::scaled", mutates_args=())
def scaled(x: torch.Tensor, wrong: bool) -> torch.Tensor:
    result = 2 * x
    if wrong and x.dtype is torch.float16:
        result[-1] = 60000.0
    return result


@torch.library.custom_op("diagnosed::blurred", mutates_args=())
def blurred(x: torch.Tensor) -> torch.Tensor:
    return x * 2.09 if x.dtype is torch.float16 else x * 2.0


@pytest.mark.parametrize(("wrong", "cause"), [(True, "kernel-off"), (False, None)])
def test_a_wrong_kernel_is_named_before_what_overflows_behind_it(wrong, cause):
    model = nn.Linear(4, 4).half()
    with Recorder(model) as recorder:
        x = torch.ones(3, 4, dtype=torch.float16)
        y = scaled(x, wrong) * 2 * model.weight.sum()
        (y.sum() * model.bias.sum()).backward()
    found = find_in_step(recorder.trace, scale=1.0)
    assert (found and found.cause.id) == cause


def test_an_overflow_before_the_wrong_kernel_is_named_instead():
    model = nn.Linear(4, 4).half()
    with Recorder(model) as recorder:
        x = torch.full((3, 4), 300.0, dtype=torch.float16)
        y = (x * x).sum() * model.weight.sum()
        _ = scaled(torch.ones(2, 2, dtype=torch.float16), True)
        (y + model.bias.sum()).backward()
    assert find_in_step(recorder.trace, scale=1.0).cause.id == "product-overflow"


def test_a_kernel_that_is_less_exact_is_not_blamed_for_an_overflow_behind_it():
    model = nn.Linear(4, 4).half()
    with Recorder(model) as recorder:
        x = blurred(torch.full((3, 4), 150.0, dtype=torch.float16))
        ((x * x).sum() * model.weight.sum() + model.bias.sum()).backward()
    assert [found.cause.id for found in find_wrong_kernels(recorder.trace)] == ["kernel-off"]
    assert find_in_step(recorder.trace, scale=1.0).cause.id == "product-overflow"
