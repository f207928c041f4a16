"""16-bit weights in a script with torch's own optimizers: the steps of floatline.optim, also through a checkpoint."""

import copy
import gc
import io

import pytest
import torch
from tests.running.by_hand import batches, bits, small_model
from tests.slow import slow
from torch import nn
from torch.nn import functional as F

from floatline.errors import PlanError
from floatline.optim import convert
from floatline.plans.plan import Clip
from floatline.plans.presets import PLANS
from floatline.running.plan_in_force import plan_in_force

BF16, FP16 = PLANS["bf16-true"], PLANS["fp16-true"]
KINDS = [
    lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
    lambda ps: torch.optim.Adam(ps, lr=1e-3),
    lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.1, foreach=False),
]


def train(make=KINDS[2], *, num=6, closure=False, begin=None, saved=None):
    """A script; it may go on from a checkpoint, and gives weights and the checkpoint of its end."""
    model = small_model()
    opt = make(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    first = 0
    if saved is not None:
        saved = torch.load(io.BytesIO(saved), weights_only=True)
        for one, key in ((model, "model"), (opt, "opt"), (schedule, "schedule")):
            one.load_state_dict(saved[key])
        first = saved["step"]
    for x, y in batches(num)[first:]:

        def compute(x=x, y=y):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        if closure:
            opt.step(compute)
        else:
            compute()
            opt.step()
        schedule.step()
    file = io.BytesIO()
    parts = {"model": model.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict(), "step": num}
    torch.save(parts, file)
    return bits(model), file.getvalue(), bits(opt.state_dict()["state"])


def by_hand(make, dtype, num=6):
    """The same with 16-bit weights and floatline's optimizer, written into the loop."""
    model = small_model().to(dtype)
    own = make(model.parameters())
    opt = convert(own, update="exact")
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for x, y in batches(num):
        opt.zero_grad()
        with torch.autocast("cpu", dtype):
            out = model(x)
        F.mse_loss(out.float(), y).backward()
        opt.step()
        schedule.step()
    return bits(model), bits(opt.state_dict()["state"])


@pytest.mark.parametrize("make", KINDS)
def test_steps_have_the_bits_of_floatlines_optimizer(make):
    with plan_in_force(BF16):
        weights, _, states = train(make)
    assert (weights, states) == by_hand(make, torch.bfloat16)


def test_torchs_own_steps_lose_updates():
    model = small_model().to(torch.bfloat16)
    opt = KINDS[2](model.parameters())
    for x, y in batches():
        opt.zero_grad()
        F.mse_loss(model(x.bfloat16()).float(), y).backward()
        opt.step()
    assert bits(model) != by_hand(KINDS[2], torch.bfloat16)[0]


@pytest.mark.parametrize("plan", [BF16, FP16], ids=lambda plan: plan.name)
def test_a_closure_gives_the_same_steps(plan):
    found = []
    for closure in (False, True):
        with plan_in_force(plan):
            found.append(train(closure=closure)[::2])
    assert found[0] == found[1]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no FP32 gradients for FP16 weights")
def test_fp16_weights_take_unscaled_fp32_gradients():
    with plan_in_force(FP16) as force:
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=1e3)
        (model(batches()[0][0]).sum() * 2.0**-27).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        grads = [p.grad.clone() for p in model.parameters()]
        opt.step()
        state = opt.state_dict()["state"]
    assert force.scale.num_skipped == 0
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    for grad, own in zip(grads, state.values(), strict=True):
        assert 0 < grad.abs().max() < 1e-7
        assert own["remainder"].any()  # what FP16 cannot hold is kept


def test_an_old_torch_is_told_of_in_one_line(monkeypatch):
    monkeypatch.setattr("floatline.running.scaled_passes._CAN_WIDEN", False)
    with plan_in_force(FP16):
        model = small_model()
        torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(PlanError, match="no FP32 gradients for FP16 weights"):
            model(batches()[0][0]).sum().backward()


@slow
@pytest.mark.parametrize("plan", [BF16, FP16], ids=lambda plan: plan.name)
@pytest.mark.parametrize("make", KINDS)
def test_a_run_that_goes_on_from_a_checkpoint_has_the_bits_of_one_without_a_break(plan, make):
    with plan_in_force(plan):
        whole = train(make)
    with plan_in_force(plan):
        half = train(make, num=3)
    with plan_in_force(plan):
        resumed = train(make, saved=half[1])
    assert resumed[0] == whole[0]
    assert resumed[2] == whole[2]


def test_without_the_optimizers_state_it_has_not():
    with plan_in_force(BF16):
        whole, half = train(), train(num=3)
        saved = torch.load(io.BytesIO(half[1]))
        saved["opt"]["state"] = {}
        file = io.BytesIO()
        torch.save(saved, file)
        assert train(saved=file.getvalue())[0] != whole[0]


def test_a_checkpoint_that_is_loaded_and_saved_before_any_step_is_the_same():
    with plan_in_force(BF16):
        half = train(num=3)
    with plan_in_force(BF16):
        again = train(num=3, saved=half[1])
    assert again[2] == half[2]


def test_a_checkpoint_loaded_into_a_running_optimizer_takes_it_back():
    with plan_in_force(BF16):
        model = small_model()
        opt = KINDS[2](model.parameters())

        def step(x, y):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()

        data = batches()
        step(*data[0])
        kept = copy.deepcopy([model.state_dict(), opt.state_dict()])
        step(*data[1])
        wanted = bits(model)
        model.load_state_dict(kept[0])
        opt.load_state_dict(kept[1])
        step(*data[1])
    assert bits(model) == wanted


def test_a_checkpoint_of_an_fp32_run_is_taken_up():
    whole = train(num=3)
    with plan_in_force(BF16):
        weights, _, states = train(saved=whole[1])
    assert weights != whole[0]
    assert states["0"]["step"] == bits(torch.tensor(6.0))


def test_groups_that_are_added_later_are_trained():
    with plan_in_force(BF16):
        model = small_model()
        opt = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
        for number, (x, y) in enumerate(batches()):
            if number == 3:
                before = bits(model[2])
                opt.add_param_group({"params": model[2].parameters(), "lr": 1e-1})
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
        assert bits(model[2]) != before
        assert len(opt.state_dict()["state"]) == 4
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@slow
def test_an_optimizer_in_the_place_of_one_that_is_gone_begins_anew():
    with plan_in_force(BF16):
        for _ in range(4):
            model = small_model()
            opt = KINDS[1](model.parameters())
            model(batches()[0][0]).sum().backward()
            opt.step()
            assert {float(one["step"]) for one in opt.state_dict()["state"].values()} == {1.0}
            del opt, model
            gc.collect()


def test_the_clip_of_a_plan_comes_before_the_step():
    def train_once(plan):
        with plan_in_force(plan):
            model = small_model()
            opt = torch.optim.SGD(model.parameters(), lr=1.0)
            before = [p.detach().bfloat16().float() for p in model.parameters()]
            (model(batches()[0][0]).sum() * 100).backward()
            opt.step()
            moved = [p.detach().float() - old for p, old in zip(model.parameters(), before, strict=True)]
            return torch.cat([one.flatten() for one in moved]).norm().item()

    assert train_once(BF16.model_copy(update={"clip": Clip(max_norm=0.5)})) == pytest.approx(0.5, rel=0.05)
    assert train_once(BF16) > 10


def test_hooks_behind_a_step_are_called_once():
    with plan_in_force(BF16):
        model, calls = small_model(), []
        opt = KINDS[1](model.parameters())
        opt.register_step_post_hook(lambda *_: calls.append(1))
        model(batches()[0][0]).sum().backward()
        opt.step()
    assert len(calls) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.RMSprop(ps),
        lambda ps: torch.optim.Adagrad(ps),
        lambda ps: torch.optim.LBFGS(ps),
        lambda ps: torch.optim.Adam(ps, amsgrad=True),
    ],
)
def test_an_optimizer_without_a_counterpart_is_told_of_in_one_line(make):
    with plan_in_force(BF16):
        model = small_model()
        opt = make(model.parameters())

        def closure():
            loss = model(batches()[0][0]).sum()
            loss.backward()
            return loss

        with pytest.raises(PlanError, match="bf16-true.*has no counterpart") as raised:
            opt.step(closure)
    assert "\n" not in str(raised.value)


class Normed(nn.Module):
    """Norms before anything narrows the inputs, and behind sums with FP32 numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.body, self.after = nn.LayerNorm(6), nn.Linear(6, 4), nn.LayerNorm(4)

    def forward(self, x):
        hidden = self.body(self.before(x))
        return self.after(hidden + torch.arange(4.0))


@pytest.mark.parametrize("plan", [BF16, FP16], ids=lambda plan: plan.name)
def test_models_with_norms_run_with_16_bit_weights(plan):
    with plan_in_force(plan):
        model = Normed()
        opt = KINDS[2](model.parameters())
        for x, y in batches():
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
    assert all(p.isfinite().all() for p in model.parameters())
