"""The scale from outside: gradients and weights of autocast and GradScaler by hand, whatever the loop does."""

import pytest
import torch
from tests.running.by_hand import ByHand, Plain, batches, bits, fp16_plan, run_both, small_model, state_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from floatline.plans.plan import Clip, Scaling
from floatline.plans.presets import PLANS
from floatline.running.plan_in_force import plan_in_force


def plain_loop(tools, *, optimizer=torch.optim.SGD, data=None, **options):
    model = small_model()
    opt = optimizer(model.parameters(), **{"lr": 0.1, **options})
    seen = []
    for x, y in data or batches():
        opt.zero_grad()
        tools.backward(F.mse_loss(tools.call(model, x), y))
        tools.unscale(opt)
        seen.append(bits([p.grad for p in model.parameters()]))
        tools.step(opt)
    return seen, bits(model), state_of(opt)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_gradients_weights_and_states_have_the_bits_of_a_scaler_by_hand(kind):
    outside, by_hand, force = run_both(lambda tools: plain_loop(tools, optimizer=kind))
    assert outside == by_hand
    assert force.scale.num_steps == 6


def test_they_are_not_those_of_fp32():
    outside, _, _ = run_both(plain_loop)
    assert outside != plain_loop(Plain())


def test_without_a_scale_small_gradients_are_lost():
    def train(tools):
        model = small_model()
        tools.backward(tools.call(model, batches()[0][0]).mean() * 2.0**-27)
        return [p.grad.abs().max().item() * (1 / 4096 if tools.by_hand else 1) for p in model.parameters()]

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand
    assert all(outside)
    with plan_in_force(fp16_plan(scaling=None)):
        assert not all(train(Plain()))


def test_the_scale_grows_and_falls_as_a_scaler_by_hand():
    scales = []

    def train(tools):
        model, own = small_model(), []
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(batches(12)):
            opt.zero_grad()
            loss = F.mse_loss(tools.call(model, x), y)
            tools.backward(loss * float("inf") if number in (4, 5, 9) else loss)
            tools.step(opt)
            own.append(tools.scaler.get_scale() if tools.by_hand else force.scale.scale)
        scales.append(own)
        return bits(model)

    by_hand = train(ByHand())
    with plan_in_force(fp16_plan()) as force:
        outside = train(Plain())
    assert outside == by_hand
    assert scales[0] == scales[1]
    assert len(set(scales[0])) > 2
    assert force.scale.num_skipped == 3


def make_descent():
    """A class of its own each time: torch prepares one when its first optimizer is made."""

    class Descent(torch.optim.Optimizer):
        """Written by hand: it does not ask whether there are gradients."""

        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["num"] = self.state[p].get("num", 0) + 1
                    p.sub_(p.grad, alpha=group["lr"])

    return Descent


@pytest.mark.parametrize("bad", [(0, 3), ()])
def test_a_step_of_an_optimizer_written_by_hand_is_left_out(bad):
    def train(tools):
        model = small_model()
        opt = make_descent()(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(batches()):
            opt.zero_grad()
            loss = F.mse_loss(tools.call(model, x), y)
            tools.backward(loss * float("inf") if number in bad else loss)
            tools.step(opt)
        return bits(model), [state["num"] for state in opt.state.values()]

    outside, by_hand, force = run_both(train)
    assert outside == by_hand
    assert set(outside[1]) == {len(batches()) - len(bad)}
    assert force.scale.num_skipped == len(bad)


def test_a_step_that_raised_while_it_was_left_out_leaves_later_ones_alone():
    class Descent(make_descent()):
        @torch.no_grad()
        def step(self, closure):
            with torch.enable_grad():
                closure()
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.1)  # raises where there is none

    model = small_model()
    x, y = batches()[0]
    with plan_in_force(fp16_plan()):
        opt = Descent(model.parameters(), lr=0.1)

        def closure(factor=float("inf")):
            loss = F.mse_loss(model(x), y) * factor
            loss.backward()
            return loss

        before = bits(model)
        with pytest.raises(TypeError):
            opt.step(closure)
        assert bits(model) == before
    opt.zero_grad()
    opt.step(lambda: closure(1.0))
    assert bits(model) != before


def test_two_optimizers_move_the_scale_once_an_iteration():
    def train(tools):
        first, second = small_model(), small_model(1)
        opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        for number, (x, y) in enumerate(batches(8)):
            for opt, model in zip(opts, (first, second), strict=True):
                opt.zero_grad()
                loss = F.mse_loss(tools.call(model, x), y)
                tools.backward(loss * float("inf") if number == 4 else loss)
            tools.step(*opts)
        return bits([first.state_dict(), second.state_dict()]), tools.scaler.get_scale() if tools.by_hand else None

    outside, by_hand, force = run_both(train)
    assert outside[0] == by_hand[0]
    assert force.scale.scale == by_hand[1]
    assert force.scale.num_skipped == 2


def test_clipped_gradients_have_the_bits_of_clipping_behind_unscale():
    def train(tools):
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        norms = []
        for x, y in batches():
            opt.zero_grad()
            tools.backward(F.mse_loss(tools.call(model, x), y))
            tools.unscale(opt)
            norms.append(bits(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            tools.step(opt)
        return norms, bits(model)

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_accumulated_gradients_have_the_bits_of_a_scaler_by_hand():
    def train(tools, set_to_none=True):
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(batches(8)):
            tools.backward(F.mse_loss(tools.call(model, x), y) / 2)
            if number % 2:
                tools.step(opt)
                opt.zero_grad(set_to_none=set_to_none)
        return bits(model)

    for set_to_none in (True, False):
        outside, by_hand, _ = run_both(lambda tools, kept=set_to_none: train(tools, kept))
        assert outside == by_hand


def test_a_gan_has_the_bits_of_a_scaler_by_hand():
    def train(tools):
        torch.manual_seed(0)
        maker, critic = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        opts = [torch.optim.Adam(m.parameters(), lr=1e-2, betas=(0.5, 0.9)) for m in (maker, critic)]
        for x, _ in batches(5):
            noise = torch.randn(5, 3)
            opts[1].zero_grad()
            fake = tools.call(maker, noise)
            loss = F.softplus(-tools.call(critic, x)).mean() + F.softplus(tools.call(critic, fake.detach())).mean()
            tools.backward(loss)
            tools.step(opts[1])
            opts[0].zero_grad()
            tools.backward(F.softplus(-tools.call(critic, fake)).mean())
            tools.step(opts[0])
        return bits([maker.state_dict(), critic.state_dict()])

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_a_gradient_penalty_has_the_bits_of_one_by_hand():
    def train(tools):
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        penalties = []
        for x, y in batches():
            opt.zero_grad()
            x.requires_grad_()
            out = tools.call(model, x)
            grads = tools.grads(out.sum(), [x], create_graph=True)
            penalty = grads[0].square().sum()
            penalties.append(bits(penalty))
            tools.backward(F.mse_loss(out, y) + 0.1 * penalty)
            tools.step(opt)
        return penalties, bits(model)

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_a_graph_that_is_kept_can_go_backward_twice():
    def train(tools):
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches():
            opt.zero_grad()
            loss = F.mse_loss(tools.call(model, x), y)
            tools.backward(loss, retain_graph=True)
            tools.backward(loss)
            tools.step(opt)
        return bits(model)

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_a_parameter_of_two_optimizers_and_one_of_none_are_unscaled_once():
    def train(tools):
        model, free = small_model(), nn.Parameter(torch.ones(4))
        opts = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.05)]
        found = []
        for x, y in batches():
            opts[0].zero_grad()
            free.grad = None
            tools.backward(F.mse_loss(tools.call(model, x) * free, y))
            if tools.by_hand:  # a scaler unscales a shared parameter twice
                tools.unscale(opts[0])
                found.append(bits(tools.unscaled(free.grad)))
                opts[0].step(), opts[1].step()
                tools.scaler.update()
            else:
                found.append(bits(free.grad))
                tools.step(*opts)
        return found, bits(model)

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_groups_that_are_added_later_are_trained_as_by_hand():
    def train(tools):
        model = small_model()
        opt = torch.optim.SGD(model[0].parameters(), lr=0.1)
        for number, (x, y) in enumerate(batches()):
            if number == 4:
                opt.add_param_group(param_group={"params": list(model[2].parameters()), "lr": 0.05})
            opt.zero_grad()
            model.zero_grad()
            tools.backward(F.mse_loss(tools.call(model, x), y))
            tools.step(opt)
        return bits(model)

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_sparse_gradients_have_the_bits_of_a_scaler_by_hand():
    def train(tools):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 4))
        opts = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)]
        for number, (_, y) in enumerate(batches()):
            for opt in opts:
                opt.zero_grad()
            for _ in range(1 + number % 2):
                tools.backward(F.mse_loss(tools.call(model, torch.tensor([1, 2, 2, 3, number])), y))
            tools.step(*opts)
        return bits(model)

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_have_the_bits_of_a_scaler_by_hand(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = small_model(), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=reentrant))

    def train(tools):
        torch.manual_seed(0)
        model = Checkpointed()
        opt = torch.optim.SGD([*model.body[0].parameters(), *model.head.parameters()], lr=0.1)  # body[2] in none
        for x, y in batches():
            opt.zero_grad()
            for _ in range(2):
                tools.backward(F.mse_loss(tools.call(model, x), y) / 2)
            tools.step(opt)
        rest = model.body[2].weight.grad
        return bits(model), bits(rest) if not tools.by_hand else None

    outside, by_hand, _ = run_both(train, scaling=Scaling(init_scale=2.0**12))
    assert outside[0] == by_hand[0]
    with plan_in_force(fp16_plan(scaling=None)):
        unscaled = train(Plain())
    seen = torch.tensor(outside[1][1], dtype=torch.int32).view(torch.float32)
    wanted = torch.tensor(unscaled[1][1], dtype=torch.int32).view(torch.float32)
    assert torch.allclose(seen, wanted, rtol=0.05, atol=1e-3)


def test_a_mode_of_torch_functions_changes_nothing():
    def train(tools):
        torch.set_default_device("cpu")
        try:
            return plain_loop(tools)
        finally:
            torch.set_default_device(None)  # a device, be it the default, is a mode that stays on

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


@pytest.mark.parametrize("clip", [Clip(max_norm=0.01), Clip(max_value=0.001)])
def test_the_clip_of_a_plan_bounds_each_step(clip):
    def train(tools):
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches():
            opt.zero_grad()
            tools.backward(F.mse_loss(tools.call(model, x), y))
            if tools.by_hand:
                tools.unscale(opt)
                if clip.max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip.max_norm)
                else:
                    nn.utils.clip_grad_value_(model.parameters(), clip.max_value)
            tools.step(opt)
        return bits(model)

    outside, by_hand, _ = run_both(train, clip=clip)
    assert outside == by_hand
    assert outside != run_both(train)[0]


@pytest.mark.parametrize(("search", "left_out"), [([], ()), ([[0, 2]], (0, 2)), ([[], [1]], ())])
def test_steps_of_another_runs_search_are_left_out(search, left_out):
    """The second list is another optimizer's, which this loop does not have."""

    def train(leaves_out=()):
        model = small_model()
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(batches()):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            if number not in leaves_out:
                opt.step()
        return bits(model), state_of(opt)

    with plan_in_force(PLANS["fp32"]) as force:
        force.scale.search = search
        found = train()
    assert found == train(left_out)
    assert (found == train()) == (not left_out)
