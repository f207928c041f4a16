"""Random numbers: one keeper of torch's, Python's and numpy's, for a closure that runs again and for checkpoints."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import floatline as fl
from floatline.errors import GuardError
from floatline.guard.checkpoints import guard_state
from floatline.guard.checkpoints.layouts import fit
from floatline.guard.policy import Policy
from floatline.precision.random_state import RandomState, draw_random, load_random, save_random, seed_all
from floatline.training.trainer import Trainer
from floatline.workload import Workload

CPU = torch.device("cpu")
DRAWS = {
    "torch": lambda: torch.rand(3).tolist(),
    "Python": lambda: [random.random(), random.gauss(0, 1)],
    "numpy": lambda: [*np.random.rand(3), np.random.randn()],
}


def draw():
    return {name: make() for name, make in DRAWS.items()}


def wear():
    """Leave the beginnings, in the middle of a pair of Gaussian numbers."""
    seed_all(3)
    random.gauss(0, 1)
    np.random.randn()


def make_guard(plan="fp32", **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return fl.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, **options)


def test_a_closure_runs_again_with_the_same_random_numbers():
    wear()
    before = RandomState.now()
    first, second = draw(), draw()
    with before.replayed():
        assert draw() == first
    before.restore()
    assert [draw(), draw()] == [first, second]


def test_after_replaying_everything_goes_on_as_if_nothing_had_run():
    wear()
    before = RandomState.now()
    with before.replayed():
        draw()
    after = draw()
    before.restore()
    assert draw() == after


def test_a_guard_that_is_loaded_draws_what_the_saved_one_would_have_drawn(tmp_path):
    guard = make_guard()
    wear()
    path = guard.save(tmp_path)
    after_save = draw()
    seed_all(99)
    make_guard().load(path)
    assert draw() == after_save


@pytest.mark.parametrize("name", DRAWS)
def test_without_loading_every_generator_draws_something_else(name, tmp_path):
    guard = make_guard()
    wear()
    guard.save(tmp_path)
    after_save = draw()
    seed_all(99)
    assert draw()[name] != after_save[name]


def test_a_checkpoint_of_an_earlier_version_without_numpys_numbers_loads():
    guard = make_guard()
    wear()
    tensors, state = guard_state.collect(guard.run)
    after_save = draw()
    del state["numpy_random"]
    seed_all(99)
    untouched = DRAWS["numpy"]()
    seed_all(99)
    guard_state.restore(guard.run, tensors, state)
    assert draw() == {**after_save, "numpy": untouched}


@pytest.mark.parametrize("damage", [["MT19937", [1, 2], 0, 0, 0.0], ["PCG64"], 7])
def test_damaged_random_numbers_are_refused_in_one_line(damage):
    guard = make_guard()
    tensors, state = guard_state.collect(guard.run)
    with pytest.raises(
        GuardError, match=r"^The state cannot be taken over .* Give a checkpoint that save\(\) wrote\.$"
    ):
        guard_state.restore(guard.run, tensors, {**state, "numpy_random": damage})


def test_what_is_saved_goes_through_json_without_loss():
    wear()
    tensors, fields = save_random(CPU)
    after = draw()
    load_random(CPU, tensors, json.loads(json.dumps(fields, allow_nan=False)))
    assert draw() == after


def test_without_numpy_nothing_of_it_is_saved(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "numpy")
    _, fields = save_random(CPU)
    assert fields["numpy_random"] is None
    load_random(CPU, {"rng.host": torch.get_rng_state()}, fields)


def test_a_process_that_was_not_there_before_gets_numbers_of_its_own():
    guard = make_guard()
    wear()
    part = guard_state.collect(guard.run)
    drawn = {}
    for rank in (0, 1, 2):
        guard_state.restore(guard.run, *fit(guard.run, [part], rank))
        drawn[rank] = draw()
    for name in DRAWS:
        assert drawn[0][name] != drawn[1][name] != drawn[2][name]


def test_drawing_for_another_process_leaves_the_generators_alone():
    wear()
    before = RandomState.now()
    draw_random(CPU, 7)
    after = draw()
    before.restore()
    assert draw() == after


def noisy_losses(model, seen):
    """A loss that draws from all three generators, and whose gradients overflow in its first call."""

    def compute_loss(x):
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        seen.append(float(noise))
        output = model(x)
        if len(seen) == 1:
            output.register_hook(lambda grad: grad * float("inf"))
        return (output * noise).float().square().mean()

    return compute_loss


def test_a_step_that_is_tried_again_draws_the_same_numbers():
    guard, seen = make_guard(plan="fp16-mixed", policy=Policy(retry_overflow=1)), []
    wear()
    guard.step(noisy_losses(guard.model, seen), torch.ones(2, 4))
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_two_steps_draw_different_numbers():
    guard, seen = make_guard(), []
    wear()
    for _ in range(2):
        guard.step(noisy_losses(guard.model, seen), torch.ones(2, 4))
    assert seen[0] != seen[1]


def test_asking_the_canary_draws_nothing():
    def canary():
        draw()
        return guard.model(torch.ones(2, 4)).square().mean()

    guard = make_guard(canary=canary)
    wear()
    before = RandomState.now()
    guard._rescue.replay(canary)
    after = draw()
    before.restore()
    assert draw() == after


class Noisy(nn.Module):
    """A model that draws from numpy and Python in every forward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        return self.inner(x) * (1 + np.random.rand() + random.random())


def noisy_workload():
    torch.manual_seed(0)
    batches = [((torch.randn(2, 4),), (torch.randn(2, 1),)) for _ in range(3)]
    return Workload(
        Noisy(), batches, nn.functional.mse_loss, "fp32", lambda model: torch.optim.SGD(model.parameters(), lr=0.01)
    )


def test_a_trainer_that_is_resumed_draws_what_one_that_was_never_ended_draws(tmp_path):
    whole = noisy_workload()
    Trainer(whole, plan="fp32", steps=6, folder=tmp_path / "whole").run()
    Trainer(noisy_workload(), plan="fp32", steps=3, folder=tmp_path / "parts").run()
    seed_all(99)
    second = noisy_workload()
    Trainer(second, plan="fp32", steps=6, folder=tmp_path / "parts", resume=True).run()
    assert all(torch.equal(a, b) for a, b in zip(second.model.parameters(), whole.model.parameters(), strict=True))
