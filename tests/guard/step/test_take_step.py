"""Steps of a guard whose forward and backward passes are someone else's."""

import math

import pytest
import torch
from torch import nn

from floatline.errors import GuardError
from floatline.guard.guard import Guard
from floatline.plans import Plan, Scaling
from floatline.precision.micro_batches import LossSum

SCALED = Plan(name="scaled", weights="fp32", compute="fp32", scaling=Scaling(init_scale=64.0))


def make(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=SCALED, **options)


def backward(model, guard, spoil=False):
    """What a framework does by itself; gives the loss."""
    model.zero_grad()
    loss = model(torch.ones(3, 4)).square().mean()
    (loss * guard.scale).backward()
    if spoil:
        model.weight.grad[0, 0] = math.inf
    return LossSum(loss=loss.detach(), weight=1.0, num=1)


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def test_it_is_the_step_of_the_guards_own_loop_and_leaves_the_gradients():
    ours, guard = make(clip_norm=0.5)
    outcome = guard.take_step(backward(ours, guard))
    theirs, other = make(clip_norm=0.5)
    expected = other.step(lambda x: theirs(x).square().mean(), torch.ones(3, 4))
    assert all(map(torch.equal, weights(ours), weights(theirs)))
    assert (outcome.loss, outcome.grad_norm) == (expected.loss, expected.grad_norm)
    assert ours.weight.grad is not None
    assert theirs.weight.grad is None


def test_a_step_that_overflowed_is_skipped_and_told_once():
    model, guard = make()
    heard = []
    guard.on_outcome = heard.append
    before = weights(model)
    outcome = guard.take_step(backward(model, guard, spoil=True))
    assert all(map(torch.equal, before, weights(model)))
    assert outcome.reason == "overflow"
    assert heard == [outcome]
    guard.take_step(backward(model, guard))
    assert [one.applied for one in heard] == [False, True]


def test_clipping_can_change_from_step_to_step():
    model, guard = make(clip_norm=1e-3)
    sizes = []
    for clip in ({"norm": 1e-3}, {"norm": math.inf}, {"value": 1e-4}):
        guard.clip_by(**clip)
        before = weights(model)
        guard.take_step(backward(model, guard))
        moved = torch.cat([(a - b).flatten() for a, b in zip(before, weights(model), strict=True)])
        sizes.append((moved.norm().item(), moved.abs().max().item()))
    assert sizes[0][0] == pytest.approx(1e-4, rel=1e-3)
    assert sizes[1][0] > 1e-2
    assert sizes[2][1] == pytest.approx(1e-5, rel=1e-2)
    with pytest.raises(GuardError, match="clip_norm is -1"):
        guard.clip_by(norm=-1.0)


def test_what_a_step_was_made_of_is_there_for_whoever_explains_it():
    seen = []
    model, guard = make(on_failure=seen.append)
    batches = ["first"]
    guard.remember(lambda batch: batch, batches)
    batches.append("second")
    guard.take_step(LossSum(loss=torch.tensor(math.nan), weight=1.0, num=2))
    assert list(seen[0].batches) == ["first", "second"]
    assert seen[0].outcome.reason == "forward-nonfinite"
    assert model.weight.isfinite().all()


def test_a_failed_step_whose_batch_is_not_known_is_told_once():
    seen = []
    model, guard = make(on_failure=seen.append)
    for _ in range(3):
        guard.backward(model(torch.full((2, 4), float("nan"))).sum())
        guard.update()
    guard.drain()
    assert not seen
    assert guard.summary().count("on_failure is called for steps made by guard.step") == 1
