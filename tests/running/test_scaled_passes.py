"""Backward passes of every kind: what the script sees is unscaled, in tensors, in hooks, and in what it is given."""

import pytest
import torch
from tests.running.by_hand import batches, bits, fp16_plan, run_both, small_model
from torch import nn
from torch.nn import functional as F

from floatline.plans.plan import Scaling
from floatline.running.plan_in_force import plan_in_force

LATE = 6  # a pass in which something is seen for the first time


def test_gradients_of_inputs_are_unscaled_whenever_they_are_first_asked_for():
    def train(tools):
        model, seen = small_model(), []
        for number, (x, y) in enumerate(batches(LATE + 2)):
            x.requires_grad_(number >= LATE)
            tools.backward(F.mse_loss(tools.call(model, x), y))
            if number >= LATE:
                seen.append(bits(tools.unscaled(x.grad)))
        return seen

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand
    assert len(outside) == 2


def test_weights_of_a_model_in_no_optimizer_are_unscaled_whenever_it_comes():
    def train(tools):
        models = small_model(), small_model(2)
        for number, (x, y) in enumerate(batches(LATE + 2)):
            tools.backward(F.mse_loss(tools.call(models[number >= LATE], x), y))
        return bits([tools.unscaled(p.grad) for model in models for p in model.parameters()])

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_a_pass_may_begin_with_a_gradient():
    def train(tools):
        model = small_model()
        for x, y in batches():
            tools.backward(tools.call(model, x), gradient=y)
        return bits([tools.unscaled(p.grad) for p in model.parameters()])

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_a_pass_may_begin_with_several_roots():
    def train(tools):
        model = small_model()
        x, y = batches()[0]
        out = tools.call(model, x)
        roots, scale = [out, out.sum().reshape(1)], tools.scaler.scale if tools.by_hand else list
        torch.autograd.backward(scale(roots), [y, None])
        return bits([tools.unscaled(p.grad) for p in model.parameters()])

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_a_pass_for_some_inputs_leaves_other_gradients_alone():
    def train(tools):
        model = small_model()
        (x, y), (x2, y2) = batches(2)
        tools.backward(F.mse_loss(tools.call(model, x), y))
        tools.backward(F.mse_loss(tools.call(model, x2), y2), inputs=[model[0].weight])
        return bits([tools.unscaled(p.grad) for p in model.parameters()])

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_gradients_that_are_retained_are_unscaled():
    def train(tools):
        model = small_model()
        x, y = batches()[0]
        out = tools.call(model, x)
        middle = out * 2
        middle.retain_grad()
        loss = F.mse_loss(middle, y)
        tools.backward(loss, retain_graph=True)
        tools.backward(loss)
        return bits([tools.unscaled(middle.grad), *(tools.unscaled(p.grad) for p in model.parameters())])

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_gradients_with_a_graph_are_unscaled():
    def train(tools):
        model = small_model()
        x, y = batches()[0]
        tools.backward(F.mse_loss(tools.call(model, x), y), create_graph=True)
        norm = sum(tools.unscaled(p.grad).square().sum() for p in model.parameters())
        found = tools.grads(norm, [model[0].weight])
        return bits([norm, *found])

    outside, by_hand, _ = run_both(train)
    assert outside == by_hand


def test_gradients_that_were_there_keep_their_bits():
    model = small_model()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = bits([p.grad for p in model.parameters()])
    other = nn.Linear(2, 2)
    with plan_in_force(fp16_plan(scaling=Scaling(init_scale=2.0**24))):
        torch.optim.SGD(model.parameters(), lr=0.1)
        other(torch.ones(1, 2)).sum().backward()
    assert bits([p.grad for p in model.parameters()]) == before


def run_under_scale(scale, train):
    with plan_in_force(fp16_plan(scaling=Scaling(init_scale=scale, cap=max(scale, 2.0)))):
        return train()


def same_under_any_scale(train):
    return run_under_scale(1.0, train) == run_under_scale(2.0**10, train)


def test_hooks_of_tensors_see_and_give_unscaled_gradients():
    seen = []

    def train(in_place=False):
        model = small_model()

        def clamp(grad):
            seen.append(grad.abs().max().item())
            return grad.clamp_(-0.01, 0.01) if in_place else grad.clamp(-0.01, 0.01)

        for p in model.parameters():
            p.register_hook((lambda grad: clamp(grad) and None) if in_place else clamp)
        out = model(batches()[0][0])
        out.register_hook(lambda grad: seen.append(grad.abs().max().item()))
        out.square().mean().backward()
        return bits([p.grad for p in model.parameters()])

    assert same_under_any_scale(train)
    assert max(seen) < 10
    assert same_under_any_scale(train)


def test_the_check_of_hooks_can_fail():
    def train():
        model = small_model()
        out = model(batches()[0][0])
        out.grad_fn.register_hook(lambda _inputs, outputs: seen.append(outputs[0].max().item()))  # torch's own kind
        out.sum().backward()

    seen = []
    run_under_scale(2.0**10, train)
    assert seen == [2.0**10]


def test_hooks_under_a_mode_of_torch_functions_are_unscaled_once():
    def train():
        model = small_model()
        with torch.device("cpu"):
            model[0].weight.register_hook(lambda grad: grad * 2)
        model(batches()[0][0]).mean().backward()
        return bits([p.grad for p in model.parameters()])

    assert same_under_any_scale(train)


def test_hooks_of_modules_see_and_give_unscaled_gradients():
    def train():
        model, seen = small_model(), []
        model[2].register_full_backward_hook(lambda _m, grads, outs: seen.append([*grads, *outs]))
        model[1].register_full_backward_hook(lambda _m, grads, _outs: (grads[0].clamp(-1e-3, 1e-3),))
        model(batches()[0][0]).mean().backward()
        return bits([p.grad for p in model.parameters()]), bits([one.float() for one in seen[0]])

    assert same_under_any_scale(train)


def test_optimizers_may_step_inside_of_the_backward_pass():
    def train():
        model = small_model()
        opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(p):
            opts[p].step()
            opts[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for x, y in batches():
            F.mse_loss(model(x), y).backward()
        assert all(p.grad is None for p in model.parameters())
        return bits(model)

    assert same_under_any_scale(train)


def test_optimizers_that_overflow_in_one_pass_let_the_scale_fall_once():
    with plan_in_force(fp16_plan(scaling=Scaling(init_scale=8.0))) as force:
        model = small_model()
        opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: opts[p].step())
        (model(batches()[0][0]).sum() * float("inf")).backward()
    assert force.scale.num_skipped == 4
    assert force.scale.scale == 4.0


def test_fp16_tensors_get_fp32_gradients():
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)
    with plan_in_force(fp16_plan(scaling=Scaling(init_scale=2.0**14))):
        for _ in range(2):
            (x.float() * 1e-9).sum().backward()
    assert x.grad.dtype == torch.float32
    assert torch.allclose(x.grad, torch.full((3,), 2e-9))


def test_a_loss_of_fp16_does_not_overflow_by_its_scale():
    x = torch.ones(3, requires_grad=True)
    with plan_in_force(fp16_plan(scaling=Scaling(init_scale=2.0**20))):
        x.half().sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def test_what_torch_refuses_is_refused_as_before():
    model, x = small_model(), batches()[0][0]
    with plan_in_force(fp16_plan()):
        with pytest.raises(RuntimeError, match="scalar outputs"):
            model(x).backward()
        with pytest.raises(RuntimeError, match="does not require grad"):
            x.sum().backward()
        loss = model(x).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        before = bits([p.grad for p in model.parameters()])
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert bits([p.grad for p in model.parameters()]) == before


def test_a_root_that_is_a_leaf_gets_its_gradient():
    x = torch.tensor(3.0, requires_grad=True)
    with plan_in_force(fp16_plan()):
        x.backward()
    assert x.grad.item() == 1.0


def test_a_pass_may_begin_at_an_edge_of_the_graph():
    x = torch.ones(2, requires_grad=True)
    with plan_in_force(fp16_plan()):
        edge = torch.autograd.graph.get_gradient_edge(x * 3)
        torch.autograd.backward((edge,), (torch.ones(2),), retain_graph=True)
        torch.autograd.backward(edge, torch.ones(2))
    assert x.grad.tolist() == [6.0, 6.0]


def test_jacobians_are_those_without_a_scale():
    def product(x):
        return x * x.flip(0)

    x = torch.tensor([1.0, 2.0, 3.0])
    with plan_in_force(fp16_plan()):
        for vectorize in (True, False):
            found = torch.autograd.functional.jacobian(product, x, vectorize=vectorize)
            assert torch.equal(found, torch.tensor([[3.0, 0, 1], [0, 4, 0], [3, 0, 1]]))


def test_everything_is_put_back():
    before = [torch.autograd.backward, torch.autograd.grad, torch.Tensor.register_hook, torch.Tensor.retain_grad]
    with plan_in_force(fp16_plan()):
        assert torch.autograd.backward is not before[0]
    assert [
        torch.autograd.backward,
        torch.autograd.grad,
        torch.Tensor.register_hook,
        torch.Tensor.retain_grad,
    ] == before
    model = small_model()
    model(batches()[0][0]).sum().backward()
    assert model[0].weight.grad.abs().max() < 100
