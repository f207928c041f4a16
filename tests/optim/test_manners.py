"""torch.optim's manners: groups, schedulers, hooks, closures, copies, compilation."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from tests.optim.steps import copies, make_params, masters, same_bits, set_grads, snapshot

import floatline
from floatline import optim


def pair(**settings):
    params = make_params(torch.bfloat16)
    wide = copies(params)
    return params, wide, optim.AdamW(params, **settings), torch.optim.AdamW(wide, foreach=True, **settings)


def equal(one, wide):
    return all(torch.equal(a, b) for a, b in zip(masters(one), wide, strict=True))


def test_it_is_a_torch_optimizer():
    assert floatline.optim is optim
    assert issubclass(optim.Optimizer, torch.optim.Optimizer)
    for name in optim.__all__:
        assert getattr(optim, name) is not None


def test_groups_have_their_own_settings():
    params = make_params(torch.float16)
    wide = copies(params)
    optimizers = [
        kind([{"params": p[:2], "lr": 1e-4}, {"params": p[2:], "weight_decay": 0.0, "betas": (0.5, 0.9)}], lr=2e-4)
        for kind, p in ((optim.AdamW, params), (torch.optim.AdamW, wide))
    ]
    for step in range(5):
        set_grads(params, wide, step=step)
        for optimizer in optimizers:
            optimizer.step()
    assert equal(optimizers[0], wide)


def test_a_group_added_later_starts_from_its_own_first_step():
    params, wide, one, two = pair(lr=1e-4)
    more = make_params(torch.float32, seed=1)
    more_wide = copies(more)
    for step in range(6):
        if step == 3:
            one.add_param_group({"params": more, "lr": 2e-4})
            two.add_param_group({"params": more_wide, "lr": 2e-4})
        set_grads(params + more, wide + more_wide, step=step)
        one.step()
        two.step()
    assert equal(one, wide + more_wide)
    assert float(one.state[more[0]]["step"]) == 3


def test_named_parameters_keep_their_names():
    model = torch.nn.Linear(3, 3)
    optimizer = optim.AdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_a_tensor_lr_is_the_number_it_holds():
    params, other = make_params(torch.bfloat16), make_params(torch.bfloat16)
    one, two = optim.AdamW(params, lr=torch.tensor(1e-3)), optim.AdamW(other, lr=float(torch.tensor(1e-3)))
    for step in range(3):
        set_grads(params, other, step=step)
        one.param_groups[0]["lr"].mul_(0.5)
        two.param_groups[0]["lr"] *= 0.5
        one.step()
        two.step()
    assert same_bits(snapshot(one), snapshot(two))


def test_lr_schedulers_drive_it():
    params, wide, one, two = pair(lr=1e-3)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-3, total_steps=10) for o in (one, two)]
    for step in range(8):
        set_grads(params, wide, step=step)
        one.step()
        two.step()
        for schedule in schedules:
            schedule.step()
    assert one.param_groups[0]["betas"] == two.param_groups[0]["betas"] != (0.9, 0.999)
    assert equal(one, wide)


def test_momentum_switched_on_later_gets_its_buffer():
    params = make_params(torch.float16)
    optimizer = optim.SGD(params, lr=0.1)
    set_grads(params)
    optimizer.step()
    assert "momentum_buffer" not in optimizer.state[params[0]]
    optimizer.param_groups[0]["momentum"] = 0.9
    set_grads(params, step=1)
    optimizer.step()
    assert optimizer.state[params[0]]["momentum_buffer"].any()


def test_hooks_run_around_the_step():
    params, _, one, _ = pair()
    seen = []
    one.register_step_pre_hook(lambda *_: seen.append("before"))
    one.register_step_post_hook(lambda *_: seen.append("after"))
    set_grads(params)
    one.step(clip_norm=1.0)
    assert seen == ["before", "after"]


def test_a_closure_computes_the_loss_with_gradients():
    param = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float16))
    optimizer = optim.SGD([param], lr=0.25)

    def closure():
        optimizer.zero_grad()
        loss = param.float().square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert param.item() == 1.0


def test_a_parameter_taken_out_of_its_group_is_not_trained():
    params, _, one, _ = pair(lr=1e-2)
    set_grads(params)
    one.step()
    taken = one.param_groups[0]["params"].pop(1)
    before = taken.detach().clone()
    set_grads(params, step=1)
    one.step()
    assert torch.equal(before, taken)


def test_gradients_are_freed_by_zero_grad():
    params, _, one, _ = pair()
    set_grads(params)
    one.step(clip_norm=1.0)
    watched = [weakref.ref(p.grad) for p in params]
    one.zero_grad()
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_train_on_alone(copier):
    params, _, one, _ = pair(lr=1e-3)
    set_grads(params)
    one.step()
    other = copier(one)
    twins = other.param_groups[0]["params"]
    before = snapshot(one)
    assert same_bits(before, snapshot(other))
    set_grads(twins, step=1)
    other.step()
    assert same_bits(before, snapshot(one))
    set_grads(params, step=1)
    one.step()
    assert same_bits(snapshot(one), snapshot(other))


def test_nearest_warns_once_where_it_is_made():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = optim.AdamW(make_params(torch.bfloat16), update="nearest")
        for step in range(2):
            set_grads(optimizer.param_groups[0]["params"], step=step)
            optimizer.step()
        optim.AdamW(make_params(torch.bfloat16))
    assert len(caught) == 1
    assert "loses every update" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_compiled_training_step_leaves_the_optimizer_out_of_the_graph():
    models = [torch.nn.Linear(4, 4).to(torch.bfloat16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    optimizers = [optim.AdamW(m.parameters(), lr=1e-2) for m in models]

    def train(model, optimizer):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step(clip_norm=1.0)

    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        train(models[0], optimizers[0])
        compiled(models[1], optimizers[1])
    assert same_bits(snapshot(optimizers[0]), snapshot(optimizers[1]))
    assert float(optimizers[1].state[models[1].weight]["step"]) == 3


def test_saving_with_torch_keeps_a_state_dict_plain():
    params, _, one, _ = pair()
    set_grads(params)
    one.step()
    buffer = io.BytesIO()
    torch.save(one.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert saved["state"][0]["remainder"].dtype == torch.int16
