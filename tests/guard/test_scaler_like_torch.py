"""LossScaler does what torch.amp.GradScaler does: the same calls to both, and the same bits come out.

The behaviours are those that PyTorch's own tests of its scaler ask for.
"""

import math
import pickle
import warnings

import pytest
import torch
from torch import nn

import floatline as fl
from floatline.errors import ScalerError

INF, NAN = float("inf"), float("nan")
START = {"init_scale": 128.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1}
SKIPPED_STEP = 2


def ours(**options):
    return fl.LossScaler("cpu", **options)


def theirs(**options):
    return torch.amp.GradScaler("cpu", **options)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def make_batches():
    torch.manual_seed(1)
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]


def spoil(model, value=INF):
    model[1].weight.grad.fill_(value)


def outcome(scaler, *models):
    weights = [p.detach().clone() for model in models for p in model.parameters()]
    return weights, scaler.get_scale(), scaler._get_growth_tracker()


# Every loop below takes a scaler, trains four steps, and gives the weights, the scale and the growth tracker.


def plain(scaler, make=torch.optim.SGD, options=None):
    model = make_model()
    optimizer = make(model.parameters(), **{"lr": 0.1, **(options or {})})
    for step, (inputs, targets) in enumerate(make_batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(inputs), targets.half())
        scaler.scale(loss).backward()
        if step == SKIPPED_STEP and scaler.is_enabled():
            spoil(model)
        scaler.step(optimizer)
        scaler.update()
    return outcome(scaler, model)


def clipped_at_the_scale(scaler):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (inputs, targets) in enumerate(make_batches()):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2 * scaler.get_scale())
        if step == SKIPPED_STEP and scaler.is_enabled():
            spoil(model)
        scaler.step(optimizer)
        scaler.update()
    return outcome(scaler, model)


def unscaled_then_clipped(scaler):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (inputs, targets) in enumerate(make_batches()):
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
        if step == SKIPPED_STEP and scaler.is_enabled():
            spoil(model)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
    return outcome(scaler, model)


def with_a_gradient_penalty(scaler):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        norm = sum((grad / scaler.get_scale()).square().sum() for grad in grads).sqrt()
        scaler.scale(loss + norm).backward()
        scaler.step(optimizer)
        scaler.update()
    return outcome(scaler, model)


def over_two_micro_batches(scaler):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (inputs, targets) in enumerate(make_batches()):
        scaler.scale(nn.functional.mse_loss(model(inputs), targets) / 2).backward()
        if step % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return outcome(scaler, model)


def with_two_optimizers(scaler):
    left, right = make_model(), make_model(seed=5)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (left, right))
    for step, (inputs, targets) in enumerate(make_batches()):
        first.zero_grad()
        second.zero_grad()
        one, two = left(inputs), right(inputs)
        scaler.scale(nn.functional.mse_loss(0.3 * one + 0.7 * two, targets)).backward(retain_graph=True)
        scaler.scale(nn.functional.mse_loss(0.6 * one - 0.4 * two, targets)).backward()
        if step == SKIPPED_STEP and scaler.is_enabled():
            spoil(right)
        scaler.unscale_(first)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    return outcome(scaler, left, right)


def with_gradients_spoilt_after_unscaling(scaler):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
        scaler.unscale_(optimizer)
        spoil(model, NAN)
        scaler.step(optimizer)
        scaler.update()
    return outcome(scaler, model)


def with_the_users_own_gradient_scale(scaler):
    weight = torch.ones((5, 5), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler.scale(torch.ones(5))
    weight.grad = torch.full_like(weight, 15.0)
    optimizer.grad_scale = torch.tensor(3.0)
    scaler.step(optimizer)
    scaler.update()
    return [weight.detach()], scaler.get_scale(), scaler._get_growth_tracker()


LOOPS = {
    "SGD": plain,
    "AdamW, foreach": lambda scaler: plain(scaler, torch.optim.AdamW, {"foreach": True}),
    "Adam, for loop": lambda scaler: plain(scaler, torch.optim.Adam, {"foreach": False}),
    "SGD, fused": lambda scaler: plain(scaler, torch.optim.SGD, {"fused": True}),
    "Adam, fused": lambda scaler: plain(scaler, torch.optim.Adam, {"fused": True}),
    "AdamW, fused": lambda scaler: plain(scaler, torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "Adagrad, fused": lambda scaler: plain(scaler, torch.optim.Adagrad, {"fused": True}),
    "clipped at the scale": clipped_at_the_scale,
    "unscaled, then clipped": unscaled_then_clipped,
    "gradient penalty": with_a_gradient_penalty,
    "two micro-batches": over_two_micro_batches,
    "two optimizers": with_two_optimizers,
    "gradients spoilt after unscaling": with_gradients_spoilt_after_unscaling,
}


def same(one, other):
    weights, *numbers = one
    other_weights, *other_numbers = other
    equal = all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(weights, other_weights, strict=True)
    )
    return equal and numbers == other_numbers


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_ends_with_torchs_weights_scale_and_tracker(name, enabled):
    assert same(LOOPS[name](ours(**START, enabled=enabled)), LOOPS[name](theirs(**START, enabled=enabled)))


def test_the_users_own_gradient_scale_is_multiplied_in_as_in_torch():
    mine, torchs = (with_the_users_own_gradient_scale(make(init_scale=5.0)) for make in (ours, theirs))
    assert same(mine, torchs)
    assert torch.allclose(mine[0][0], torch.full((5, 5), 0.9))  # 15 / (5 x 3) = 1, times a learning rate of 0.1


@pytest.mark.parametrize("name", [name for name in LOOPS if name != "gradients spoilt after unscaling"])
def test_the_comparison_above_sees_another_start(name):
    assert not same(LOOPS[name](ours(**START)), LOOPS[name](theirs(**{**START, "init_scale": 2.0**14})))


def test_gradients_spoilt_after_unscaling_reach_the_weights_as_in_torch():
    weights, _, _ = with_gradients_spoilt_after_unscaling(ours(**START))
    assert any(weight.isnan().any() for weight in weights)


@pytest.mark.parametrize("init_scale", [1e38, 2.0**40, 3.0, 0.5, 2.0**-20, 1, torch.tensor(4.0)])
def test_every_start_value_is_taken_as_torch_takes_it(init_scale):
    options = {**START, "init_scale": init_scale, "growth_interval": 100}
    mine, torchs = ours(**options), theirs(**options)
    assert mine.get_scale() == float(torchs.get_scale())
    assert same(over_two_micro_batches(mine), over_two_micro_batches(torchs))


def test_a_large_start_grows_no_further_than_float32_reaches():
    options = {"init_scale": 1e38, "growth_factor": 16.0, "growth_interval": 1}
    results = []
    for scaler in (ours(**options), theirs(**options)):
        weight = nn.Parameter(torch.full((5,), 1e-3))
        optimizer = torch.optim.Adam([weight])
        scaler.scale((weight.sum() * 1e-30).square()).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append(([weight.detach()], scaler.get_scale()))
    assert same(*results)
    assert results[0][1] == pytest.approx(1e38)


def test_a_start_outside_the_limits_that_were_not_given_moves_them():
    high, low = ours(init_scale=2.0**30).state_dict(), ours(init_scale=0.25).state_dict()
    assert (high["floor"], high["cap"]) == (1.0, 2.0**30)
    assert (low["floor"], low["cap"]) == (0.25, 2.0**24)


@pytest.mark.parametrize(("start", "taken"), [(0.0, 1.0), (-8.0, 1.0), (INF, 2.0**24), (1e39, 3.4028234663852886e38)])
def test_a_start_that_no_step_could_be_made_with_is_brought_within_the_limits(start, taken):
    assert ours(init_scale=start).get_scale() == taken


@pytest.mark.parametrize("start", [1e39, 1e-50])
def test_there_torchs_scaler_fails_or_divides_by_zero(start):
    scaler = theirs(init_scale=start)
    try:
        scaler.scale(torch.ones(()))
    except RuntimeError as error:
        assert "without overflow" in str(error)
    else:
        assert scaler.get_scale() == 0.0
    assert ours(init_scale=start).scale(torch.ones(())) > 0


@pytest.mark.parametrize(("options", "limit"), [({"cap": 4096.0}, "cap 4096"), ({"floor": 2.0**20}, "1.04858e\\+06")])
def test_a_start_outside_a_limit_that_was_given_is_refused(options, limit):
    with pytest.raises(ScalerError, match=f"^init_scale 65536 is outside .*{limit}.*Move init_scale or the limit"):
        ours(**options)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: ours(init_scale=NAN), "init_scale"),
        (lambda: (s := ours(), s.scale(torch.ones(())), s.update(NAN)), "new_scale"),
        (lambda: (s := ours(), s.scale(torch.ones(())), s.update(torch.tensor(NAN))), "new_scale"),
        (lambda: (s := ours(), s.scale(torch.ones(())), s.update(torch.tensor([NAN]))), "new_scale"),
    ],
)
def test_a_nan_scale_is_refused_in_one_line(call, name):
    with pytest.raises(ScalerError) as refused:
        call()
    assert str(refused.value) == f"{name} nan cannot be a scale. Give a number, such as 65536."


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor"])
def test_a_factor_that_would_make_the_scale_nan_is_refused_in_one_line(name):
    calls = [
        lambda: ours(**{name: NAN}),
        lambda: getattr(ours(), f"set_{name}")(NAN),
        lambda: ours().load_state_dict({**ours().state_dict(), name: NAN}),
    ]
    for call in calls:
        with pytest.raises(ScalerError, match=f"^{name} nan is no factor of a scale. Give a number, such as"):
            call()


def test_there_torchs_scaler_ends_with_a_nan_scale():
    scaler = torch.amp.GradScaler("cpu", backoff_factor=NAN)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert math.isnan(scaler.get_scale())


def test_a_refused_scale_leaves_the_old_one():
    scaler = ours(init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(ScalerError):
        scaler.update(torch.tensor(NAN))
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("zero", [0.0, 0, torch.tensor(0.0)])
def test_a_new_scale_of_0_is_the_floor(zero):
    scaler = ours(floor=2.0)
    scaler.scale(torch.ones(()))
    scaler.update(zero)
    assert scaler.get_scale() == 2.0


def test_there_torchs_scaler_makes_nan_of_every_weight():
    weights = {}
    for name, scaler in (("ours", ours()), ("theirs", theirs())):
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(torch.ones(()))
        scaler.update(0.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        weights[name] = weight.detach()
    assert weights["theirs"].isnan().all()
    assert weights["ours"].isfinite().all()


@pytest.mark.parametrize("enabled", [True, False])
def test_an_empty_first_group_is_stepped_as_in_torch(enabled):
    results = []
    for scaler in (ours(**START, enabled=enabled), theirs(**START, enabled=enabled)):
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([{"params": []}, {"params": [weight]}], lr=0.1)
        scaler.scale(weight.square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append(outcome(scaler, nn.ParameterList([weight])))
    assert same(*results)
    assert not torch.equal(results[0][0][0], torch.ones(3))


def test_a_disabled_scaler_steps_an_optimizer_without_parameters():
    scaler = ours(enabled=False)
    scaler.step(torch.optim.SGD([{"params": []}], lr=0.1))
    assert scaler.applied


@pytest.mark.parametrize("used", [True, False])
def test_pickles_keep_what_torchs_keep(used):
    options = {"init_scale": 3.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2}
    loaded = []
    for scaler in (ours(**options), theirs(**options)):
        if used:
            scaler.scale(torch.ones(()))
        loaded.append(pickle.loads(pickle.dumps(scaler)))
    mine, torchs = loaded
    assert mine._per_optimizer_states["anything"] == torchs._per_optimizer_states["anything"]
    assert mine._init_growth_tracker == torchs._init_growth_tracker
    assert torch.equal(mine.scale(torch.tensor([4.0])), torchs.scale(torch.tensor([4.0])))
    assert torchs.state_dict().items() <= mine.state_dict().items()


@pytest.mark.parametrize("used", [True, False])
def test_a_state_replaces_all_that_was_set_as_in_torch(used):
    results = []
    for make in (ours, theirs):
        source = make(init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
        scaler = make(init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
        scaler._init_growth_tracker = 7
        if used:
            scaler.scale(torch.ones(1))
        scaler.load_state_dict(source.state_dict())
        state = scaler.state_dict()
        results.append([state[key] for key in theirs().state_dict()] + [scaler._init_growth_tracker])
    assert results[0] == results[1] == [3.0, 4.0, 0.5, 2, 0, 0]


def mixed_gradients(bad_at):
    grads = [torch.full((20, 20), 4.0), torch.full((20, 20), 4.0)[:, :5], torch.full((20, 20), 4.0).t()]
    grads += [torch.full((20, 20), 4.0, dtype=dtype) for dtype in (torch.float16, torch.float64)]
    if bad_at is not None:
        grads[bad_at][2, 2] = INF
    return grads


@pytest.mark.parametrize("bad_at", [None, 0, 1, 2, 3, 4])
def test_gradients_of_every_layout_and_dtype_are_unscaled_and_checked_as_in_torch(bad_at):
    results = []
    for scaler in (ours(), theirs()):
        params = [torch.empty_like(grad) for grad in mixed_gradients(None)]
        for param, grad in zip(params, mixed_gradients(bad_at), strict=True):
            param.grad = grad
        found = scaler._unscale_grads_(
            torch.optim.SGD(params, lr=1.0), torch.full((1,), 0.25), torch.zeros(1), allow_fp16=True
        )
        results.append(([param.grad for param in params], [float(flag) for flag in found.values()]))
    assert same(*results)
    assert results[0][1] == [float(bad_at is not None)]


@pytest.mark.parametrize("values", [[16.0, 32.0, 64.0], [16.0, INF, 64.0], [NAN, 1.0, 1.0], [64000.0, 32.0, 64000.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sparse_gradients_are_unscaled_and_checked_as_in_torch(dtype, values):
    results = []
    for scaler in (ours(), theirs()):
        grad = torch.sparse_coo_tensor([[0, 1, 0], [2, 0, 2]], values, (2, 3), dtype=dtype, check_invariants=True)
        param = torch.zeros(2, 3, dtype=dtype)
        param.grad = grad
        found = scaler._unscale_grads_(
            torch.optim.SGD([param], lr=1.0), torch.full((1,), 0.25), torch.zeros(1), allow_fp16=True
        )
        results.append(([param.grad.to_dense()], [float(flag) for flag in found.values()]))
    assert same(*results)


def test_two_fp16_entries_that_overflow_once_added_up_are_found():
    grad = torch.sparse_coo_tensor(
        [[0, 0], [2, 2]], [64000.0, 64000.0], (2, 3), dtype=torch.float16, check_invariants=True
    )
    param = torch.zeros(2, 3, dtype=torch.float16)
    param.grad = grad
    found = ours()._unscale_grads_(torch.optim.SGD([param], lr=1.0), torch.ones(1), torch.zeros(1), allow_fp16=True)
    assert [float(flag) for flag in found.values()] == [1.0]


class AsksForTheScaler(torch.optim.SGD):
    """An optimizer of the old contract: `step` is handed the scaler."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self._step_supports_amp_scaling = True
        self.seen = None

    def step(self, closure=None, *, grad_scaler=None):
        self.seen = (grad_scaler, hasattr(self, "grad_scale"), hasattr(self, "found_inf"))


class AsksForTheNumbers(AsksForTheScaler):
    """An optimizer of the new contract: it finds the scale and the flag on itself."""

    def step(self, closure=None):
        self.seen = (float(self.grad_scale), float(self.found_inf))


@pytest.mark.parametrize("make", [ours, theirs])
def test_optimizers_that_unscale_themselves_are_handed_what_torch_hands_them(make):
    model = make_model()
    first, second = (kind(model.parameters(), lr=0.1) for kind in (AsksForTheScaler, AsksForTheNumbers))
    scaler = make(init_scale=2.0)
    scaler.scale(model(torch.ones(1, 8)).mean()).backward()
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(second)
    scaler.update()
    assert first.seen == (scaler, False, False)
    assert second.seen == (2.0, 0.0)
    assert not hasattr(second, "grad_scale")
