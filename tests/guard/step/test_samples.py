"""Samples of skipped outliers are recognised: in another batch, at another place, not where a bit differs."""

import pytest
import torch
from torch import nn

import floatline as fl
from floatline.guard.step.samples import APART, ROOM, Samples, number_samples


def test_a_sample_has_its_number_in_any_batch_and_at_any_place():
    x, y = torch.randn(6, 3, 5), torch.randint(0, 9, (6, 7))
    numbers = number_samples([x, y])
    order = torch.tensor([4, 1, 0])
    assert torch.equal(number_samples([x[order], y[order]]), numbers[order])
    assert len(numbers.unique()) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_one_element_that_differs_makes_another_number(dtype):
    x = torch.randint(0, 2, (4, 33)).to(dtype)
    numbers = number_samples([x])
    for place in range(33):
        other = x.clone()
        other[2, place] = 1 - other[2, place].to(torch.float32)
        assert (number_samples([other]) != numbers).tolist() == [False, False, True, False]


def test_the_order_of_tokens_counts():
    assert number_samples([torch.tensor([[1, 2, 3, 4]])]) != number_samples([torch.tensor([[2, 1, 3, 4]])])


def test_what_has_no_samples_has_no_numbers():
    assert number_samples([torch.tensor(1.0)]) is None
    assert number_samples([torch.empty(0, 3)]) is None
    assert number_samples([torch.eye(3).to_sparse()]) is None


def remember(samples, model, batch, *, skipped):
    model(batch)
    known = bool(samples.were_skipped())
    samples.note(torch.tensor(skipped))
    return known


def test_a_sample_is_known_some_time_after_it_was_skipped_and_then_for_good():
    model, x = nn.Linear(3, 1), torch.randn(200, 3)
    samples = Samples(model, torch.device("cpu"))
    assert not remember(samples, model, x[:4], skipped=True)
    assert not remember(samples, model, x[:4], skipped=True)  # the fault goes on: it is no other epoch
    for i in range(APART):
        assert not remember(samples, model, x[4 + 4 * i : 8 + 4 * i], skipped=False)
    assert remember(samples, model, x[[150, 2, 151]], skipped=False)
    assert not remember(samples, model, x[[150, 151, 152]], skipped=False)


def test_evaluation_is_not_looked_at():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    samples = Samples(model, torch.device("cpu"))
    with torch.no_grad():
        model(x)
    model.eval()(x)
    assert samples._now == []


def test_no_more_samples_are_kept_than_there_is_room_for():
    model, x = nn.Linear(2, 1), torch.randn(ROOM + 100, 2)
    samples = Samples(model, torch.device("cpu"))
    remember(samples, model, x, skipped=True)
    assert samples.skipped.shape == (2, ROOM)
    assert (samples.skipped[1] == 1).all()


HARD = 7  # of 50 samples, one is far from the others


def train(policy, *, epochs=12, shuffled=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    x, w = torch.randn(50, 4), torch.randn(4, 1)
    y = x @ w + 0.3 * torch.randn(50, 1)
    y[HARD] += 40
    guard = fl.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), plan="fp32", policy=policy)
    lost = []
    for epoch in range(epochs):
        order = torch.randperm(50) if shuffled else torch.arange(50)
        for rows in order.split(5):
            outcome = guard.step(lambda i: (model(x[i]) - y[i]).square().mean(), rows)
            lost += [epoch] * (not outcome.applied and HARD in rows)
    return lost


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_harder_sample_is_skipped_once_and_then_trained_on(shuffled):
    policy = fl.Policy(skip_outliers=True, outlier_warmup=16)
    assert len(train(policy, shuffled=shuffled)) <= 10 // 2 + 1  # within APART steps it may be met again


def test_by_default_it_is_never_skipped():
    assert train(None) == []


def test_without_a_memory_it_would_be_skipped_in_every_epoch(monkeypatch):
    monkeypatch.setattr(Samples, "were_skipped", lambda self: torch.tensor(False))
    lost = train(fl.Policy(skip_outliers=True, outlier_warmup=16))
    assert lost[-1] == 11
    assert len(set(lost)) >= 8
