"""Micro-batches: the step sees the average over items, and closures can be run again exactly."""

import contextlib

import pytest
import torch

from floatline.errors import GuardError
from floatline.guard.closures import Randomness, Sum, run_micro_batches, take_loss


def model_and_data(items=10):
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1), torch.randn(items, 4)


def run(model, compute_loss, batches, scale=1.0):
    model.zero_grad()
    total = run_micro_batches(
        compute_loss, batches, model=model, autocast=contextlib.nullcontext, scale=torch.tensor(scale)
    )
    return total, model.weight.grad / (scale * total.weight)


def test_equal_micro_batches_give_the_gradient_of_the_whole_batch():
    model, data = model_and_data(8)
    total, grad = run(model, lambda x: model(x).square().mean(), [data[:4], data[4:]])
    whole, expected = run(model, lambda x: model(x).square().mean(), [data])
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(total.mean, whole.mean)


def test_unequal_micro_batches_are_weighted_by_their_items():
    model, data = model_and_data()
    total, grad = run(model, lambda x: (model(x).square().mean(), len(x)), [data[:7], data[7:]])
    whole, expected = run(model, lambda x: model(x).square().mean(), [data])
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(total.mean, whole.mean)


def test_without_weights_the_average_of_unequal_micro_batches_is_another():
    model, data = model_and_data()
    _, grad = run(model, lambda x: model(x).square().mean(), [data[:7], data[7:]])
    _, expected = run(model, lambda x: model(x).square().mean(), [data])
    assert not torch.allclose(grad, expected)


def test_weights_may_be_tensors():
    model, data = model_and_data()
    _, grad = run(model, lambda x: (model(x).square().mean(), torch.tensor(float(len(x)))), [data[:7], data[7:]])
    _, expected = run(model, lambda x: model(x).square().mean(), [data])
    torch.testing.assert_close(grad, expected)


def test_the_loss_is_as_it_was_whatever_the_scale():
    model, data = model_and_data()
    total, _ = run(model, lambda x: model(x).square().mean(), [data], scale=65536.0)
    torch.testing.assert_close(total.mean, model(data).square().mean().detach())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3.5, "is a float"),
        (torch.ones(3, requires_grad=True), "shape \\(3,\\)"),
        (torch.tensor(3), "torch.int64"),
        (torch.tensor(3.0), "does not depend"),
        (None, "is a NoneType"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(value, message):
    with pytest.raises(GuardError, match=message):
        take_loss(value, "The loss")


def test_an_update_without_a_loss_is_refused():
    with pytest.raises(GuardError, match="before backward"):
        _ = Sum().mean


def test_a_closure_runs_again_with_the_same_random_numbers():
    before = Randomness(torch.device("cpu"))
    first = torch.rand(3)
    after = torch.rand(3)
    with before.replayed():
        assert torch.equal(torch.rand(3), first)
    before.restore()
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), after)
