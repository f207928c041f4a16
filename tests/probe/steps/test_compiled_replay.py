"""A captured step replayed as torch.compile computes it: its loss and gradients, by any backend."""

import pytest
import torch
import torch.nn.functional as F
from tests.slow import slow
from torch import nn

import floatline as fl
from floatline.errors import ReplayError
from floatline.probe import capture_step


def make_step(*, plan: str = "fp32", dropout: float = 0.0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.BatchNorm1d(8), nn.Linear(8, 3))
    batch = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture_step(model, optimizer, lambda b: F.cross_entropy(model(b[0]), b[1]), batch, plan=plan, **options)


def negated(graph, _examples):
    """A backend that gives the first output with another sign."""
    return lambda *values: (-(made := graph(*values))[0], *made[1:])


@slow
def test_a_compiled_replay_is_the_step_and_leaves_everything_as_it_was():
    step = make_step(dropout=0.5)
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    eager, compiled = step.replay(), step.replay(compiled="aot_eager")
    assert compiled.loss == pytest.approx(eager.loss, rel=1e-6)
    assert compiled.gradients.keys() == eager.gradients.keys()
    assert all(torch.allclose(compiled.gradients[n], eager.gradients[n], atol=1e-6) for n in eager.gradients)
    assert all(torch.equal(before[name], tensor) for name, tensor in step.model.state_dict().items())


def test_a_backend_that_is_wrong_gives_another_step():
    step = make_step()
    assert step.replay(compiled=negated).loss == pytest.approx(-step.replay().loss)


@slow
def test_more_replays_than_torch_keeps_code_for_are_compiled_each():
    step = make_step()
    assert {round(step.replay(compiled=negated).loss, 4) for _ in range(9)} == {-round(step.replay().loss, 4)}


def test_a_step_that_is_not_compiled_is_not_taken_for_one():
    step = make_step()
    with pytest.raises(ReplayError, match="left all of it to eager code"), fl.HalfOnCPU():
        step.replay(compiled=negated)
    with pytest.raises(ReplayError, match="the step's own precision"):
        step.replay(compiled=True, precision="fp32")


def test_half_on_cpu_of_the_step_does_not_keep_it_from_being_compiled():
    step = make_step(plan="bf16-mixed", half_on_cpu=True)
    assert step.replay(compiled=negated).loss == pytest.approx(-step.replay().loss, rel=1e-2)
