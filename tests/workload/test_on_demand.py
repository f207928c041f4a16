"""OnDemand: entries are made when they are asked for, and a workload takes it for its batches."""

import pytest
import torch
from torch import nn

from floatline.errors import TargetError
from floatline.training.trainer import Trainer
from floatline.workload import OnDemand, Workload


def test_entries_are_made_when_asked_for_and_not_before() -> None:
    made: list[int] = []
    row = OnDemand(lambda i: made.append(i) or 10 * i, 5)
    assert len(row) == 5 and made == []
    assert row[3] == 30 and row[-1] == 40 and made == [3, 4]
    assert list(row[1::2]) == [10, 30] and len(row[1:3][1:]) == 1
    assert list(OnDemand(lambda i: i, range(0, 6, 4))) == [0, 4]
    with pytest.raises(IndexError):
        row[5]


def build(batches: object) -> Workload:
    return Workload(
        nn.Linear(2, 1), batches, nn.functional.mse_loss, "fp32", lambda m: torch.optim.SGD(m.parameters(), 0.1)
    )


def test_a_workload_trains_on_batches_on_demand_as_on_a_list() -> None:
    def make(i: int) -> tuple:
        x = torch.full((4, 2), float(i))
        return (x,), (x.sum(1, keepdim=True),)

    weights = []
    for batches in (OnDemand(make, 3), [make(i) for i in range(3)]):
        torch.manual_seed(0)
        workload = build(batches)
        Trainer(workload, folder=None, steps=4).run()
        weights.append(workload.model.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("batches", ["text", (x for x in "ab"), OnDemand(lambda i: i, 0), {0: 1}])
def test_what_is_no_sequence_of_batches_is_refused(batches: object) -> None:
    with pytest.raises(TargetError, match="must be a list"):
        build(batches)
