"""Steps that are made or left out: closures, optimizers around others, batch statistics, and how the scale falls."""

import warnings

import pytest
import torch
from tests.running.by_hand import batches, bits, fp16_plan, run_both, small_model, state_of
from torch import nn
from torch.nn import functional as F

from floatline.plans.plan import Scaling
from floatline.running.plan_in_force import plan_in_force


def test_a_step_with_a_closure_is_a_step_like_any_other():
    def train(tools):
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number, (x, y) in enumerate(batches()):

            def closure(x=x, y=y, bad=number == 2):
                opt.zero_grad()
                loss = F.mse_loss(tools.call(model, x), y)
                tools.backward(loss * float("inf") if bad else loss)
                return loss

            if tools.by_hand:
                closure()
                tools.step(opt)
            else:
                assert isinstance(opt.step(closure=closure) if number % 2 else opt.step(closure), torch.Tensor)
        return bits(model), state_of(opt)

    outside, by_hand, force = run_both(train)
    assert outside == by_hand
    assert (force.scale.num_steps, force.scale.num_skipped) == (6, 1)


def test_lbfgs_moves_no_weight_by_a_gradient_that_is_not_finite():
    model = small_model()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, y = batches()[0]
    bad = False

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        (loss * float("inf") if bad else loss).backward()
        return loss

    with plan_in_force(fp16_plan()):
        first = opt.step(closure).item()
        opt.step(closure)
        assert closure().item() < first
        bad, before = True, bits(model)
        opt.step(closure)
        assert bits(model) == before
        bad = False
        opt.step(closure)
    assert bits(model) != before
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_optimizer_inside_of_another_ones_step_is_a_part_of_it():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    model = small_model()
    opt = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    with plan_in_force(fp16_plan()) as force:
        for number, (x, y) in enumerate(batches(4)):
            before = bits(model)
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            (loss * float("inf") if number == 1 else loss).backward()
            opt.step()
            assert (bits(model) == before) == (number == 1)
    assert (force.scale.num_steps, force.scale.num_skipped) == (4, 1)


def test_a_step_that_raised_does_not_hide_the_next_one():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("broken")

    model = small_model()
    broken, opt = Broken(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    with plan_in_force(fp16_plan()) as force:
        F.mse_loss(model(batches()[0][0]), batches()[0][1]).backward()
        with pytest.raises(RuntimeError, match="broken"):
            broken.step()
        opt.step()
    assert force.scale.num_steps == 2


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def test_a_step_that_is_left_out_changes_nothing():
    with plan_in_force(fp16_plan()) as force, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = WithNorm()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.9)
        for number, (x, y) in enumerate(batches()):
            opt.zero_grad()
            before = bits(model), state_of(opt)
            loss = F.mse_loss(model(x), y)
            (loss * float("nan") if number in (0, 3) else loss).backward()
            grads = [p.grad for p in model.parameters()]
            opt.step()
            schedule.step()
            assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
            assert ((bits(model), state_of(opt)) == before) == (number in (0, 3))
    assert force.scale.num_skipped == 2
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**6)


def test_batch_statistics_of_a_step_that_is_made_stay():
    with plan_in_force(fp16_plan()):
        model = WithNorm()
        opt = torch.optim.SGD(model.parameters(), lr=1e-2)
        for x, y in batches(2):  # both batches of one step
            F.mse_loss(model(x), y).backward()
        opt.step()
    assert int(model.norm.num_batches_tracked) == 2


def test_complex_weights_are_trained():
    weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    opt = torch.optim.SGD([weight], lr=0.1)
    with plan_in_force(fp16_plan()) as force:
        for factor in (1.0, float("inf")):
            opt.zero_grad()
            (torch.view_as_real(weight).square().sum() * factor).backward()
            opt.step()
    assert force.scale.num_skipped == 1
    assert torch.view_as_real(weight).isfinite().all()


def test_the_scale_falls_after_as_many_overflows_as_the_plan_says():
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    with plan_in_force(fp16_plan(scaling=Scaling(init_scale=8.0, hysteresis=2, floor=2.0))) as force:
        for factor in ("inf", "1", "inf", "inf", "inf", "inf"):
            opt.zero_grad()
            (model(batches()[0][0]).sum() * float(factor)).backward()
            opt.step()
            scales.append(force.scale.scale)
    assert scales == [8.0, 8.0, 8.0, 4.0, 2.0, 2.0]
