"""A loop may have told torch where new tensors go and what they are made of: floatline's own are as they should be."""

import contextlib

import pytest
import torch
from tests.guard.test_guard import batches, loss_with, make_model, make_optimizer, weights

import floatline as fl
from floatline.numerics import measure_ranges
from floatline.numerics.tally import tally


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "as_usual": contextlib.nullcontext,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "elsewhere": lambda: torch.device("meta"),  # a tensor that is made without a device has no numbers
}


@pytest.mark.parametrize("name", list(DEFAULTS)[1:])
@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed", "bf16-mixed"])
def test_guarded_steps_have_the_bits_that_they_have_without(plan, name):
    ends = []
    for context in (DEFAULTS["as_usual"], DEFAULTS[name]):
        model, data = make_model(), batches(6)
        with context():
            guard = fl.Guard(model, make_optimizer(model, "floatline"), plan=plan, clip_norm=0.1)
            for batch in data:
                guard.step(loss_with(guard), batch)
        ends.append(weights(guard))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("name", list(DEFAULTS)[1:])
def test_ranges_are_the_same(name):
    values = torch.randn(4096).half()
    expected = measure_ranges(values)
    tally._pattern_facts.cache_clear()
    with DEFAULTS[name]():
        found = measure_ranges(values)
    assert str(found) == str(expected)
