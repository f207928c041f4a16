"""A loss divided by the number of micro-batches, which the guard averages over itself, is told; others are not."""

import pytest
import torch
from torch import nn

import floatline as fl
from floatline.precision.micro_batches import find_divisor


@pytest.mark.parametrize(
    ("divide", "divisor"),
    [
        (lambda loss: loss / 4, 4.0),
        (lambda loss: loss * 0.25, 4.0),
        (lambda loss: (loss / torch.tensor(4.0)).reshape(1), 4.0),
        (lambda loss: loss + 1, 1.0),
        (lambda loss: loss, 1.0),
        (lambda loss: loss / loss.detach(), None),
    ],
)
def test_what_a_loss_was_divided_by_is_read_from_its_graph(divide, divisor):
    loss = nn.Linear(3, 1)(torch.ones(2, 3)).square().mean()
    expected = float(loss) if divisor is None else divisor
    assert find_divisor(divide(loss)) == pytest.approx(expected)


def notes(*, by, num, way):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    guard = fl.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="fp32")
    for _ in range(3):
        batches = torch.randn(num, 5, 3).unbind()
        if way == "step":
            guard.step(lambda x: model(x).square().mean() / by, *batches)
        else:
            for x in batches:
                guard.backward(model(x).square().mean() / by)
            guard.update()
    return str(guard.accounts.last_event or "")


@pytest.mark.parametrize("way", ["step", "backward"])
def test_a_division_that_is_made_twice_is_noted(way):
    assert "divided by 4, and the guard averages over the 4 as well" in notes(by=4, num=4, way=way)


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize(("by", "num"), [(1, 4), (2, 4), (4, 1)])
def test_other_divisions_are_not(way, by, num):
    assert notes(by=by, num=num, way=way) == ""


def test_half_arithmetic_on_a_cpu_is_no_obstacle():
    loss = nn.Linear(3, 1)(torch.ones(2, 3)).square().mean()
    with fl.HalfOnCPU():
        assert find_divisor(loss / 4) == 4.0
        assert find_divisor(loss * (1 / 3)) == 3.0
