"""A script's own GradScaler, used rightly or wrongly: it makes no difference, and its checkpoint carries the scale."""

import copy
import pickle

import pytest
import torch
from tests.running.by_hand import SCALING, batches, bits, fp16_plan, small_model
from torch import nn
from torch.nn import functional as F

from floatline.plans.plan import Scaling
from floatline.running.plan_in_force import plan_in_force


def train(use, *, bad=None, clips=False):
    """A loop of six steps, of which one may overflow; `use` is what a script does with its scaler."""
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(batches()):
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss = loss * float("inf") if number == bad else loss
        use(loss, opt, (lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)) if clips else (lambda: None))
    return bits(model)


def without(loss, opt, clip):
    loss.backward()
    clip()
    opt.step()


def rightly():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def use(loss, opt, clip):
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        clip()
        scaler.step(opt)
        scaler.update()

    return use


def clipping_before_unscale():
    scaler = torch.amp.GradScaler("cpu")

    def use(loss, opt, clip):
        scaler.scale(loss).backward()
        clip()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()

    return use


def without_update():
    scaler = torch.amp.GradScaler("cpu")

    def use(loss, opt, clip):
        scaler.scale(loss).backward()
        clip()
        scaler.step(opt)

    return use


def unscaling_twice():
    scaler = torch.amp.GradScaler("cpu")

    def use(loss, opt, clip):
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        scaler.unscale_(opt)
        clip()
        scaler.step(opt)
        scaler.update()

    return use


def stepping_the_optimizer():
    scaler = torch.amp.GradScaler("cpu")

    def use(loss, opt, clip):
        scaler.scale(loss).backward()
        clip()
        opt.step()
        scaler.update()

    return use


def backward_without_scale():
    scaler = torch.amp.GradScaler("cpu")

    def use(loss, opt, clip):
        loss.backward()
        clip()
        scaler.step(opt)
        scaler.update()

    return use


def disabled():
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def use(loss, opt, clip):
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        clip()
        scaler.step(opt)
        scaler.update()

    return use


def new_in_each_step():
    def use(loss, opt, clip):
        torch.cuda.amp.GradScaler()
        rightly()(loss, opt, clip)

    return use


def dividing_by_its_scale():
    scaler = torch.amp.GradScaler("cpu")

    def use(loss, opt, clip):
        scaler.scale(loss).backward()
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad.div_(scaler.get_scale())
        clip()
        opt.step()
        scaler.update(2.0)

    return use


USES = [
    rightly,
    clipping_before_unscale,
    without_update,
    unscaling_twice,
    stepping_the_optimizer,
    backward_without_scale,
    disabled,
    new_in_each_step,
    dividing_by_its_scale,
]


@pytest.mark.filterwarnings("ignore:.*GradScaler")
@pytest.mark.parametrize("make", USES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("bad", [None, 3])
def test_a_scaler_makes_no_difference(make, bad):
    found = []
    for use in (lambda: without, make):
        with plan_in_force(fp16_plan()):
            found.append(train(use(), bad=bad, clips=True))
    assert found[0] == found[1]


def test_without_a_plan_the_misuses_make_a_difference():
    assert train(clipping_before_unscale(), clips=True) != train(without, clips=True)
    with pytest.raises(AssertionError, match="No inf checks"):
        train(stepping_the_optimizer())
    with pytest.raises(RuntimeError, match="already been called"):
        train(unscaling_twice())


def test_a_scaler_is_what_it_was_after_the_run():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with plan_in_force(fp16_plan()):
        assert not scaler.is_enabled()
        assert scaler.get_scale() == 1.0
    assert scaler.is_enabled()
    assert scaler.get_scale() == 4.0
    assert torch.amp.GradScaler("cpu").state_dict()["scale"] == 65536.0


def test_a_scaler_has_its_settings():
    with plan_in_force(fp16_plan()):
        scaler = torch.amp.GradScaler("cpu", growth_factor=3.0)
        assert not scaler.is_enabled()
        assert (scaler.get_growth_factor(), scaler.get_growth_interval()) == (3.0, 2000)
    assert scaler.is_enabled()


def run_part(state=None, num=4):
    with plan_in_force(fp16_plan()) as force:
        scaler = torch.amp.GradScaler("cpu")
        if state is not None:
            scaler.load_state_dict(state)
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(num):
            opt.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(opt)
            scaler.update()
        return scaler.state_dict(), force.scale.scale


def test_its_checkpoint_carries_the_scale_and_how_long_it_was_good():
    state, scale = run_part(num=5)
    assert scale == SCALING.init_scale * 2
    state = pickle.loads(pickle.dumps(state))
    assert run_part(state, num=0) == (state, scale)
    assert run_part(state, num=1)[1] == scale * 2  # the third good one
    assert run_part(num=1)[1] == SCALING.init_scale


def test_torch_reads_its_checkpoint_and_it_reads_torchs():
    state, scale = run_part(num=5)
    own = torch.amp.GradScaler("cpu")
    own.load_state_dict(copy.deepcopy(state))
    assert own.get_scale() == scale
    assert own.state_dict()["_growth_tracker"] == 2
    assert run_part(own.state_dict(), num=1)[1] == scale * 2


def test_a_checkpoint_from_a_scaler_that_was_off_changes_nothing():
    assert run_part({}, num=0)[1] == SCALING.init_scale


def test_a_scale_outside_of_the_plans_bounds_is_brought_inside():
    own = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    own.scale(torch.zeros(()))
    assert run_part(own.state_dict(), num=0)[1] == Scaling().cap


def test_under_bf16_a_scaler_saves_and_loads_nothing():
    with plan_in_force(fp16_plan(compute="bf16", scaling=None)):
        scaler = torch.amp.GradScaler("cpu")
        assert scaler.state_dict() == {}
        scaler.load_state_dict({"scale": 4.0, "_growth_tracker": 0})


OWN = {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}


def scales_of(plan, *, makes=True, num=5, bad=3):
    """The scale before the first step and after each; one of them may overflow."""
    with plan_in_force(plan) as force:
        scaler = torch.amp.GradScaler("cpu", **OWN, enabled=makes)
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        found = [force.scale.scale]
        for number, (x, y) in enumerate(batches(num)):
            opt.zero_grad()
            scaler.scale(F.mse_loss(model(x), y) * (float("inf") if number == bad else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
            found.append(force.scale.scale)
    return found


def test_the_scale_begins_and_moves_as_the_scripts_own_where_the_plan_sets_nothing():
    scaler = torch.amp.GradScaler("cpu", **OWN)
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = [1024.0]
    for number, (x, y) in enumerate(batches(5)):
        opt.zero_grad()
        scaler.scale(F.mse_loss(model(x), y) * (float("inf") if number == 3 else 1.0)).backward()
        scaler.step(opt)
        scaler.update()
        alone.append(scaler.get_scale())
    assert scales_of(fp16_plan(scaling=Scaling())) == alone == [1024.0, 1024.0, 4096.0, 4096.0, 1024.0, 1024.0]


def test_a_scaler_that_is_off_says_nothing():
    assert scales_of(fp16_plan(scaling=Scaling()), makes=False) == [65536.0] * 4 + [32768.0] * 2


@pytest.mark.parametrize("first", [65536.0, 8.0])
def test_what_the_plan_sets_wins_also_where_it_is_the_default(first):
    assert scales_of(fp16_plan(scaling=Scaling(init_scale=first)))[:3] == [first, first, first * 4]
    whole = Scaling(**Scaling().model_dump())
    assert scales_of(fp16_plan(scaling=whole)) == [65536.0] * 4 + [32768.0] * 2


def test_bounds_of_the_plan_hold_for_the_scripts_scale_and_open_ones_make_room():
    assert scales_of(fp16_plan(scaling=Scaling(init_scale=64.0, cap=512.0)), num=5, bad=None)[-1] == 512.0
    assert scales_of(fp16_plan(scaling=Scaling(floor=2048.0)))[0] == 2048.0
    for first in (2.0**30, 0.25):
        with plan_in_force(fp16_plan(scaling=Scaling())) as force:
            torch.amp.GradScaler("cpu", init_scale=first)
            assert force.scale.scale == force.scale.first_scale == first


def test_only_the_first_scaler_is_heard():
    with plan_in_force(fp16_plan(scaling=Scaling())) as force:
        for first in (16.0, 4.0):
            torch.amp.GradScaler("cpu", init_scale=first)
        assert force.scale.scale == 16.0


def test_its_checkpoint_has_the_settings_that_are_in_force():
    with plan_in_force(fp16_plan(scaling=Scaling(growth_interval=7))):
        state = torch.amp.GradScaler("cpu", **OWN).state_dict()
    assert (state["scale"], state["growth_factor"], state["growth_interval"]) == (1024.0, 4.0, 7)
