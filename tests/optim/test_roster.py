"""Who takes part in a step is remembered, and forgotten as soon as anything but the gradients' numbers changes."""

import gc
import weakref

import pytest
import torch
from tests.optim.steps import make_params, set_grads

from floatline.optim.roster import collect
from floatline.optim.rules import ADAMW
from floatline.optim.survey import fill

SHAPES = [(4, 4), (4, 4), (7,)]
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "maximize": False}


class Scene:
    """Three parameters, the last without a gradient, and the roster of their first step."""

    def __init__(self):
        self.params = make_params(torch.float16, shapes=SHAPES)
        set_grads(self.params)
        self.params[2].grad = None
        self.groups = [{"params": self.params, **SETTINGS}]
        self.state = {param: {} for param in self.params}
        _, self.entries, self.roster = collect(self.groups, self.state, rule=ADAMW, update="exact", states="fp32")

    def refresh(self):
        return self.roster.refresh(self.groups, self.state)


def new_grads(scene):
    for param in scene.params[:2]:
        param.grad = torch.ones_like(param)


def swap_weight(scene):
    scene.params[0].data = scene.params[0].data.clone()


def wide_gradient(scene):
    scene.params[0].grad.data = scene.params[0].grad.data.float()


def sparse_gradient(scene):
    scene.params[0].grad = torch.eye(4, dtype=torch.float16).to_sparse()


def no_gradient(scene):
    scene.params[0].grad = None


def idle_wakes_up(scene):
    scene.params[2].grad = torch.ones(7, dtype=torch.float16)


def equal_parameter_in_its_place(scene):
    twin = torch.nn.Parameter(scene.params[0].detach().clone())
    twin.grad = scene.params[0].grad
    scene.groups[0]["params"] = [twin, *scene.params[1:]]


def another_group(scene):
    scene.groups.append({"params": [], **SETTINGS})


def loaded_state(scene):
    scene.state[scene.params[0]] = dict(scene.state[scene.params[0]])


def test_new_gradients_are_taken():
    scene = Scene()
    new_grads(scene)
    assert scene.refresh()
    assert all(a is b.grad for a, b in zip(scene.entries.grads, scene.params, strict=False))
    assert scene.entries.addresses == [p.grad.data_ptr() for p in scene.params[:2]]
    fill(scene.entries)
    assert [entry.grad.sum().item() for entry in scene.entries] == [16, 16]


@pytest.mark.parametrize(
    "change",
    [
        swap_weight,
        wide_gradient,
        sparse_gradient,
        no_gradient,
        idle_wakes_up,
        equal_parameter_in_its_place,
        another_group,
        loaded_state,
    ],
)
def test_any_other_change_asks_for_a_new_roster(change):
    scene = Scene()
    assert scene.refresh()
    change(scene)
    assert not scene.refresh()


def test_gradients_are_let_go_after_the_step_however_they_were_held():
    scene = Scene()
    watched = [weakref.ref(param.grad) for param in scene.params[:2]]
    # As a backend does that gives them another layout.
    scene.entries.take([p.grad.clone() for p in scene.params[:2]], [0, 0])
    new_grads(scene)
    gc.collect()
    assert all(ref() is not None for ref in watched)
    scene.roster.release()
    gc.collect()
    assert all(ref() is None for ref in watched)
