"""A micro-batch without items adds nothing to a step, although the mean of nothing is NaN."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import floatline as fl


def make():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, fl.Guard(model, torch.optim.SGD(model.parameters(), 0.1), plan="fp32")


def labels_of(ignored):
    labels = torch.arange(8) % 3
    return torch.full_like(labels, -100) if ignored else labels


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["ignored labels", "no rows"])
def test_a_micro_batch_without_items_leaves_the_step_as_it_is(kind, first, as_tensor):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    weights = []
    for is_beside in (True, False):
        model, guard = make()
        full, empty = (x, labels_of(False)), (x, labels_of(True))
        if kind == "no rows":
            empty = (x[:0], labels_of(False)[:0])
        batches = ([empty, full] if first else [full, empty]) if is_beside else [full]

        def loss(batch, model=model):
            count = (batch[1] >= 0).sum()
            return F.cross_entropy(model(batch[0]), batch[1]), count if as_tensor else int(count)

        step = guard.step(loss, *batches)
        assert step.applied
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def test_with_a_weight_of_1_it_would_be_nan():
    model, guard = make()
    x = torch.randn(8, 4)
    step = guard.step(
        lambda batch: (F.cross_entropy(model(batch[0]), batch[1]), 1), (x, labels_of(True)), (x, labels_of(False))
    )
    assert step.reason == "forward-nonfinite"


def test_what_is_not_finite_in_a_micro_batch_of_items_is_still_seen():
    model, guard = make()
    step = guard.step(lambda x: (model(x).mean(), torch.tensor(2)), torch.full((2, 4), torch.nan))
    assert step.reason == "forward-nonfinite"
