"""A nudge moves the weights once, and nothing else."""

import pytest
import torch

from floatline.probe.watch.patches import Patches
from floatline.running.nudge import Nudge


def train(share, *, by_hand=False, steps=3):
    """Weights after each step, and a random number that is drawn at the end."""
    patches = Patches()
    if share:
        Nudge(share).patch(patches)
    torch.manual_seed(0)
    try:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        seen = []
        for _ in range(steps):
            model(torch.ones(2, 8)).sum().backward()
            if by_hand:
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.0 * p.grad
            else:
                optimizer.step()
            seen.append(model.weight.detach().clone())
        return seen, torch.rand(1)
    finally:
        patches.undo()


def test_weights_are_moved_once_and_by_no_more_than_the_share():
    bare, nudged = train(0.0)[0], train(2**-8)[0]
    moved = (nudged[0] / bare[0] - 1).abs()
    assert 0 < moved.max() <= 2**-8 * 1.001
    assert torch.equal(nudged[0], nudged[2])


def test_loops_without_an_optimizer_are_nudged_too():
    assert not torch.equal(train(0.0, by_hand=True)[0][0], train(2**-8, by_hand=True)[0][0])


def test_random_numbers_of_the_script_stay_as_they_are():
    assert torch.equal(train(0.0)[1], train(2**-8)[1])


def test_a_second_pass_over_the_same_graph_still_works():
    patches = Patches()
    Nudge(2**-8).patch(patches)
    try:
        w = torch.ones(3, requires_grad=True)
        loss = (w * w).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    finally:
        patches.undo()
    assert w.grad is not None


def test_weights_whose_gradient_is_taken_by_autograd_grad_are_moved():
    def train():
        torch.manual_seed(0)
        w, b = torch.randn(3, requires_grad=True), torch.randn(1, requires_grad=True)
        torch.autograd.grad(((w * 2).sum() + b).sum(), (w, b))
        return [*w.tolist(), *b.tolist()]

    before, patches = train(), Patches()
    Nudge(2.0**-8).patch(patches)
    try:
        after = train()
    finally:
        patches.undo()
    assert before != after
    assert after == pytest.approx(before, rel=2.0**-7)


def test_weights_are_moved_where_new_tensors_lie_on_another_device():
    model, data, patches = torch.nn.Linear(8, 8), torch.ones(2, 8), Patches()
    before = model.weight.detach().clone()
    Nudge(2**-8).patch(patches)
    try:
        with torch.device("meta"):
            model(data).sum().backward()
    finally:
        patches.undo()
    assert not torch.equal(model.weight, before)
