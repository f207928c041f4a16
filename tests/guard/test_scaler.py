"""LossScaler against torch.amp.GradScaler, and what it adds: limits, hysteresis, a true account of the step."""

import copy
import pickle

import pytest
import torch
from tests.guard.loops import backward, make_params, run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import floatline as fl
from floatline.errors import FloatlineError, ScalerError

INF, NAN = float("inf"), float("nan")
SCRIPT = [None, INF, None, None, None, NAN, -INF, None, None, None, None, None, None, INF, None, None]
SAME = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "floatline adamw": lambda params: fl.optim.AdamW(params, lr=0.01),
}


def scaler_of(**options):
    return fl.LossScaler("cpu", **options)


def same_bits(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scale_tracker_and_weights_follow_torchs_scaler_bit_for_bit(name, clip):
    ours, theirs = make_params(), make_params()
    first = run(scaler_of(**SAME), OPTIMIZERS[name](ours), ours, SCRIPT, clip=clip)
    second = run(torch.amp.GradScaler("cpu", **SAME), OPTIMIZERS[name](theirs), theirs, SCRIPT, clip=clip)
    assert first == second
    assert same_bits(ours, theirs)
    assert all(p.isfinite().all() for p in ours)


def test_the_comparison_above_can_fail():
    ours, theirs = make_params(), make_params()
    run(scaler_of(**SAME), OPTIMIZERS["sgd"](ours), ours, SCRIPT)
    run(scaler_of(**SAME), OPTIMIZERS["sgd"](theirs), theirs, [None] * len(SCRIPT))
    assert not same_bits(ours, theirs)


def test_bf16_weights_follow_torchs_scaler_bit_for_bit():
    ours, theirs = make_params(torch.bfloat16), make_params(torch.bfloat16)
    options = {**SAME, "growth_factor": 1.5, "backoff_factor": 0.7}  # scales that are no powers of two
    first = run(scaler_of(**options), OPTIMIZERS["sgd"](ours), ours, SCRIPT)
    second = run(torch.amp.GradScaler("cpu", **options), OPTIMIZERS["sgd"](theirs), theirs, SCRIPT)
    assert first == second
    assert same_bits(ours, theirs)


def test_it_is_a_gradscaler_and_takes_its_arguments_in_order():
    scaler = fl.LossScaler("cpu", 512.0, 4.0, 0.25, 7, True)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.get_scale() == 512.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 7)
    assert scaler_of().get_scale() == 65536.0
    assert scaler_of().get_growth_interval() == 1000


def stepped(scaler):
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1)
    backward(scaler, params, 0)
    scaler.step(optimizer)
    return optimizer


def twice(first, second):
    def calls(scaler):
        params = make_params()
        optimizer = torch.optim.SGD(params, lr=0.1)
        backward(scaler, params, 0)
        getattr(scaler, first)(optimizer)
        getattr(scaler, second)(optimizer)

    return calls


def without_gradients(scaler):
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD(make_params(), lr=0.1))


MISUSES = {
    "unscale twice": (twice("unscale_", "unscale_"), RuntimeError),
    "unscale after step": (twice("step", "unscale_"), RuntimeError),
    "step twice": (twice("step", "step"), RuntimeError),
    "no gradients": (without_gradients, AssertionError),
    "update without step": (lambda s: (s.scale(torch.ones(())), s.update()), AssertionError),
    "step before scale": (lambda s: s.step(torch.optim.SGD(make_params(), lr=0.1)), AssertionError),
    "unscale before scale": (lambda s: s.unscale_(torch.optim.SGD(make_params(), lr=0.1)), AssertionError),
    "update before scale": (lambda s: s.update(), AssertionError),
    "closure": (lambda s: s.step(stepped(s), closure=lambda: 0), RuntimeError),
    "no tensor": (lambda s: s.scale([1.0]), ValueError),
    "empty state": (lambda s: s.load_state_dict({}), RuntimeError),
    "pickled in mid-iteration": (lambda s: (stepped(s), pickle.dumps(s)), AssertionError),
    "tensor that requires a gradient": (
        lambda s: (s.scale(torch.ones(())), s.update(torch.ones((), requires_grad=True))),
        AssertionError,
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_what_torch_raises(name):
    misuse, kind = MISUSES[name]
    with pytest.raises(kind) as theirs:
        misuse(torch.amp.GradScaler("cpu"))
    with pytest.raises(kind) as ours:
        misuse(scaler_of())
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("options", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_wrong_factors_raise_what_torch_raises(options):
    with pytest.raises(AssertionError) as theirs:
        torch.amp.GradScaler("cpu", **options)
    with pytest.raises(AssertionError) as ours:
        scaler_of(**options)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"floor": 0.0}, "floor 0.0 cannot be a scale. Give a finite number above 0."),
        ({"cap": NAN}, "cap nan cannot be a scale. Give a finite number above 0."),
        ({"floor": 8.0, "cap": 4.0}, "floor 8 is above cap 4. Give a floor no larger than the cap."),
        ({"hysteresis": 0}, "hysteresis 0 is not a number of overflows. Give a whole number from 1 up."),
        (
            {"init_scale": 0.5, "floor": 1.0},
            "init_scale 0.5 is outside floor 1 and cap 1.67772e+07. Move init_scale or the limit.",
        ),
    ],
)
def test_wrong_limits_are_refused_in_one_line(options, message):
    with pytest.raises(ScalerError) as refused:
        scaler_of(**options)
    assert str(refused.value) == message
    assert isinstance(refused.value, FloatlineError)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_170_bad_steps_healthy_ones_leave_the_weights_finite(name):
    params = make_params()
    history = run(scaler_of(), OPTIMIZERS[name](params), params, [NAN] * 170 + [None] * 3)
    assert all(p.isfinite().all() for p in params)
    assert not same_bits(params, make_params())
    assert history[-1] == (1.0, 3)


# A fused optimizer divides by the scale instead of multiplying by its inverse: it lasts until the scale is 0.
@pytest.mark.parametrize(("fused", "num_bad"), [(False, 150), (True, 170)])
def test_there_torchs_scaler_writes_inf_or_nan_into_the_weights(fused, num_bad):
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1, fused=fused)
    run(torch.amp.GradScaler("cpu"), optimizer, params, [NAN] * num_bad + [None])
    assert not any(p.isfinite().all() for p in params)


def test_the_scale_stops_at_floor_and_cap():
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = scaler_of(init_scale=16.0, floor=3.0, cap=20.0, growth_interval=1)
    scales = [scale for scale, _ in run(scaler, optimizer, params, [INF, INF, INF, INF, None, None, None, None, None])]
    assert scales == [8.0, 4.0, 3.0, 3.0, 6.0, 12.0, 20.0, 20.0, 20.0]


def test_the_scale_falls_from_the_nth_overflow_in_a_row_on():
    script = [INF, INF, None, INF, INF, INF, INF, None, INF]
    params = make_params()
    scaler = scaler_of(init_scale=1024.0, growth_interval=100, hysteresis=3)
    history = run(scaler, torch.optim.SGD(params, lr=0.1), params, script)
    assert [scale for scale, _ in history] == [1024, 1024, 1024, 1024, 1024, 512, 256, 256, 256]
    assert [tracker for _, tracker in history] == [0, 0, 1, 0, 0, 0, 0, 1, 0]


def test_with_hysteresis_bad_steps_are_skipped_all_the_same():
    params = make_params()
    run(scaler_of(hysteresis=5), torch.optim.SGD(params, lr=0.1), params, [INF, NAN, -INF])
    assert same_bits(params, make_params())


def test_a_state_goes_on_exactly_in_a_new_scaler():
    options = {"init_scale": 1024.0, "growth_interval": 4, "hysteresis": 2, "floor": 2.0, "cap": 4096.0}
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1)
    whole = run(scaler_of(**options), optimizer, params, [None, INF, INF, INF, None, None])
    first = scaler_of(**options)
    run(first, optimizer, params, [None, INF])
    for make in (
        lambda: scaler_of(),
        lambda: (used := scaler_of(), used.scale(torch.ones(())))[0],
    ):
        second = make()
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        assert run(second, optimizer, params, [INF, INF, None, None]) == whole[2:]


def test_pickles_and_copies_go_on_exactly():
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = scaler_of(hysteresis=2)
    run(scaler, optimizer, params, [None, INF])
    for other in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert other.state_dict() == scaler.state_dict()
        assert run(other, optimizer, params, [INF]) == [(32768.0, 0)]


def test_states_go_both_ways_between_torchs_scaler_and_this_one():
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1)
    theirs, ours = torch.amp.GradScaler("cpu", **SAME), scaler_of()
    run(theirs, optimizer, params, SCRIPT[:4])
    ours.load_state_dict(theirs.state_dict())
    assert {key: ours.state_dict()[key] for key in theirs.state_dict()} == theirs.state_dict()
    run(ours, optimizer, params, [None])
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict().items() <= ours.state_dict().items()
    assert run(back, optimizer, params, [INF, None]) == run(ours, optimizer, params, [INF, None])


def test_a_collapsed_scale_of_torchs_scaler_comes_back_to_the_floor():
    params = make_params()
    theirs, ours = torch.amp.GradScaler("cpu"), scaler_of()
    run(theirs, torch.optim.SGD(params, lr=0.1), params, [NAN] * 170)
    assert theirs.get_scale() == 0.0
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == 1.0


def test_a_state_that_is_not_finite_is_refused():
    with pytest.raises(ScalerError, match="The saved scale is nan. Start with a new scaler"):
        scaler_of().load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "scale": NAN})


def test_a_new_scale_is_taken_within_the_limits():
    scaler = scaler_of(init_scale=8.0, cap=4096.0)
    scaler.scale(torch.ones(()))
    for given, taken in ((256.0, 256.0), (512, 512.0), (torch.tensor(64.0), 64.0), (0.25, 1.0), (1e9, 4096.0)):
        scaler.update(given)
        assert scaler.get_scale() == taken
    with pytest.raises(ScalerError, match="new_scale nan cannot be a scale"):
        scaler.update(NAN)


def test_nested_outputs_are_scaled_as_by_torch():
    scaler = scaler_of(init_scale=4.0)
    one, (two, three) = scaler.scale([torch.ones(()), (torch.ones(2), torch.ones(1))])
    assert (float(one), two.tolist(), three.tolist()) == (4.0, [4.0, 4.0], [4.0])


def test_disabled_it_passes_everything_through():
    scaler = scaler_of(enabled=False, init_scale=0.1)
    params, bare = make_params(), make_params()
    optimizer, reference = torch.optim.SGD(params, lr=0.1), torch.optim.SGD(bare, lr=0.1)
    loss = sum((p * 2).sum() for p in params)
    assert scaler.scale(loss) is loss
    loss.backward()
    sum((p * 2).sum() for p in bare).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    reference.step()
    assert same_bits(params, bare)
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled(), scaler.applied) == (1.0, {}, False, True)
    scaler.load_state_dict({})


def test_without_cuda_it_warns_and_is_disabled_as_torchs():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not fl.LossScaler().is_enabled()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_applied_tells_the_truth_with_every_optimizer(name):
    params = make_params()
    optimizer, scaler = OPTIMIZERS[name](params), scaler_of()
    assert (scaler.applied, scaler.applied_flag) == (False, None)
    for step, bad in enumerate([None, INF, None, NAN]):
        before = [p.detach().clone() for p in params]
        optimizer.zero_grad()
        backward(scaler, params, step, bad=bad)
        scaler.step(optimizer)
        assert scaler.applied == (bad is None)
        assert float(scaler.applied_flag) == float(bad is None)
        scaler.update()
        assert scaler.applied == (bad is None) == (not same_bits(params, before))


@pytest.mark.parametrize("name", ["sgd", "fused sgd"])
def test_what_torchs_step_returns_cannot_tell(name):
    params = make_params()
    optimizer, scaler = OPTIMIZERS[name](params), torch.amp.GradScaler("cpu")
    returned = []
    for bad in (None, INF):
        optimizer.zero_grad()
        backward(scaler, params, 0, bad=bad)
        returned.append(scaler.step(optimizer))
        scaler.update()
    assert returned == [None, None]


def test_a_step_that_the_optimizer_skips_itself_counts_as_not_applied():
    params = make_params()
    optimizer, scaler = fl.optim.SGD(params, lr=0.1), scaler_of()
    backward(scaler, params, 0)
    scaler.step(optimizer, skip=True)
    assert not scaler.applied
    scaler.update()
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, fl.optim.SGD])
def test_of_two_optimizers_only_the_overflowing_one_is_skipped(optimizer_type):
    left, right = make_params(), make_params()
    first, second = optimizer_type(left, lr=0.1), optimizer_type(right, lr=0.1)
    scaler = scaler_of()
    backward(scaler, left, 0, bad=INF)
    backward(scaler, right, 1)
    scaler.step(first)
    scaler.step(second)
    assert same_bits(left, make_params())
    assert not same_bits(right, make_params())
    assert not scaler.applied
    scaler.update()
    assert scaler.get_scale() == 32768.0
    second.zero_grad()
    backward(scaler, right, 2)
    scaler.step(second)  # an iteration without the other one
    assert scaler.applied


class HostReads(TorchDispatchMode):
    """Counts the numbers that Python reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_of_a_step(name, *, unscale):
    params = make_params()
    optimizer, scaler = OPTIMIZERS[name](params), scaler_of(hysteresis=2)
    run(scaler, optimizer, params, [None])
    optimizer.zero_grad()
    with HostReads() as reads:
        backward(scaler, params, 1)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        _ = scaler.applied_flag
    return reads.count


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", ["fused sgd", "fused adamw"])  # floatline's reads on a CPU, where it costs nothing
def test_nothing_is_read_on_the_host_with_optimizers_that_unscale_themselves(name, unscale):
    assert reads_of_a_step(name, unscale=unscale) == 0


@pytest.mark.parametrize("unscale", [False, True])
def test_with_others_one_number_is_read_as_in_torch(unscale):
    assert reads_of_a_step("sgd", unscale=unscale) == 1


def test_amp_loop_trains_like_torchs():
    results = []
    for scaler in (scaler_of(**SAME), torch.amp.GradScaler("cpu", **SAME)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(4, 8)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        results.append(list(model.parameters()))
    assert same_bits(*results)
