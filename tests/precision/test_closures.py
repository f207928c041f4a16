"""Micro-batches: the step sees the average over items, and what cannot be averaged is refused."""

import contextlib

import pytest
import torch

import floatline as fl
from floatline.errors import GuardError
from floatline.precision.micro_batches import LossSum, check_closure, run_micro_batches, take_loss


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


BAD_WEIGHTS = [(-1, "-1"), (-0.5, "-0.5"), (float("nan"), "nan"), (float("inf"), "inf"), (torch.tensor(-2.0), "-2")]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("weight", "shown"), BAD_WEIGHTS)
def test_a_weight_that_is_no_number_of_items_is_refused_in_one_line(weight, shown, place):
    weights = [4, 4]
    weights[place] = weight
    model, data = model_and_data()
    with pytest.raises(GuardError) as refused:
        run(model, lambda i: (model(data[:4]).square().mean(), weights[i]), [0, 1])
    assert str(refused.value) == (
        f"The weight of micro-batch {place + 1} is {shown}. Give the number of its items: finite, and not below 0."
    )


def test_a_weight_of_many_numbers_is_refused():
    with pytest.raises(
        GuardError, match=r"^The weight of micro-batch 1 has shape \(2,\)\. Give the number of its items"
    ):
        LossSum().add(torch.ones((), requires_grad=True), torch.ones(2))


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0)])
def test_a_step_whose_weights_add_up_to_0_is_refused(zero):
    model, data = model_and_data()
    with pytest.raises(GuardError) as refused:
        run(model, lambda _: (model(data).square().mean(), zero), [0, 1])
    assert str(refused.value) == (
        "The weights of a step's micro-batches (2) add up to 0. "
        "Give the number of items of each, and make no step without items."
    )


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0, 4), (0, 3, 0, 1)])
def test_a_micro_batch_without_items_adds_nothing_wherever_it_stands(sizes):
    model, data = model_and_data(4)
    parts = data.split(list(sizes))
    total, grad = run(model, lambda x: (model(x).square().sum() / max(1, len(x)), len(x)), parts)
    whole, expected = run(model, lambda x: model(x).square().mean(), [data])
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(total.mean, whole.mean)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, fl.optim.AdamW])
def test_an_optimizer_that_needs_no_closure_is_taken(kind):
    check_closure(kind([torch.nn.Parameter(torch.ones(2))], lr=0.1))


def test_an_optimizer_that_needs_a_closure_is_refused_in_one_line():
    with pytest.raises(GuardError) as refused:
        check_closure(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))]))
    assert str(refused.value) == (
        "LBFGS.step() needs a closure, and a guarded step is decided from gradients computed once. "
        "Use another optimizer, such as floatline.optim.AdamW, or train with LBFGS without a guard."
    )


def test_an_update_without_a_loss_is_refused():
    with pytest.raises(GuardError, match="before backward"):
        _ = LossSum().mean
