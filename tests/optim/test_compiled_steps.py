"""Compiled steps on a CPU: the bits of the same step in torch operations, or no loop."""

import re

import pytest
import torch
from tests.optim.steps import HALVES, copies, make_params, masters, same_bits, set_grads, snapshot
from torch import nn

from floatline import optim
from floatline.numerics import compiled
from floatline.optim.kernels import compiled_steps

pytestmark = pytest.mark.skipif(
    compiled.split_loops() is None, reason="numba is not installed, or this processor does not convert float16"
)
SETTINGS = {
    "plain": {},
    "settings": {"lr": 2e-4, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "maximize": True},
    "no decay": {"weight_decay": 0.0},
}


@pytest.fixture
def runs(monkeypatch):
    """Loops for small tensors, too; how often they have run."""
    monkeypatch.setattr(compiled, "COMPILED_FROM", 1)
    found = []
    run_loop = compiled.run_loop
    monkeypatch.setattr(compiled, "run_loop", lambda *args: found.append(1) or run_loop(*args))
    return found


def uncompiled_twin(monkeypatch, run):
    """What a function gives where there is no loop."""
    with monkeypatch.context() as patch:
        patch.setattr(compiled_steps, "_loop_for", lambda name, dtype: None)
        return run()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_the_trained_numbers_are_those_of_torch_on_float32(settings, dtype, runs):
    params = make_params(dtype)
    wide = copies(params)
    ours, theirs = optim.AdamW(params, **settings), torch.optim.AdamW(wide, foreach=True, **settings)
    for step in range(60):
        set_grads(params, wide, step=step)
        ours.step()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(masters(ours), wide, strict=True))
    assert len(runs) >= 60


@pytest.mark.parametrize(("decay", "looped"), [(0.0, True), (0.1, False)])
def test_adam_without_decay_is_adamw_without_decay(decay, looped, runs):
    params = make_params(torch.bfloat16)
    wide = copies(params)
    ours, theirs = (kind(p, weight_decay=decay) for kind, p in ((optim.Adam, params), (torch.optim.Adam, wide)))
    for step in range(20):
        set_grads(params, wide, step=step)
        ours.step()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(masters(ours), wide, strict=True))
    assert bool(runs) == looped


SGD = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "maximize": True},
    "momentum": {"momentum": 0.9, "dampening": 0.3},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("settings", SGD.values(), ids=list(SGD))
def test_sgd_trains_the_numbers_of_torch_on_float32(settings, dtype, runs):
    params = make_params(dtype)
    wide = copies(params)
    ours, theirs = optim.SGD(params, lr=1e-2, **settings), torch.optim.SGD(wide, lr=1e-2, foreach=True, **settings)
    for step in range(30):
        set_grads(params, wide, step=step)
        ours.step()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(masters(ours), wide, strict=True))
    assert len(runs) >= 30


@pytest.mark.parametrize("dtype", HALVES)
def test_scale_clip_and_states_are_those_of_torch_operations(dtype, runs, monkeypatch):
    def run():
        params = make_params(dtype)
        optimizer = optim.AdamW(params, lr=1e-2)
        for step in range(5):
            set_grads(params, step=step)
            optimizer.step(scale=3.0, clip_norm=0.01)
        return snapshot(optimizer)

    assert same_bits(run(), uncompiled_twin(monkeypatch, run))
    assert runs


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 6e4])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_plain_step_with_a_bad_gradient_does_what_torch_operations_do(dtype, value, runs, monkeypatch):
    def run():
        params = make_params(dtype, shapes=[(40,)])
        with torch.no_grad():
            params[0][:3] = torch.tensor([6.5e4, -6.5e4, 0.0], dtype=dtype)
        optimizer = optim.AdamW(params, lr=100.0)
        for step in range(3):
            set_grads(params, step=step)
            params[0].grad[7] = value
            optimizer.step()
        return [tensor.float().nan_to_num(12345.0, 1e30, -1e30) for tensor in snapshot(optimizer)[0].values()]

    assert all(map(torch.equal, run(), uncompiled_twin(monkeypatch, run)))


@pytest.mark.parametrize("kind", ["transposed", "with gaps"])
def test_strides_do_not_change_the_numbers(kind, runs, monkeypatch):
    def run():
        start = make_params(torch.float16, shapes=[(12, 14)])[0].detach()
        wide = torch.zeros(12, 28, dtype=torch.float16)
        wide[:, ::2] = start
        weight = nn.Parameter(start.T.contiguous().T if kind == "transposed" else wide[:, ::2])
        optimizer = optim.AdamW([weight], lr=1e-2)
        for step in range(3):
            set_grads([weight], step=step)
            optimizer.step(clip_norm=1.0)
        return snapshot(optimizer)

    assert same_bits(run(), uncompiled_twin(monkeypatch, run))
    assert runs


def test_several_threads_give_the_bits_of_one(runs, monkeypatch):
    def run():
        params = make_params(torch.bfloat16, shapes=[(1000,), (33, 17)])
        optimizer = optim.AdamW(params, lr=1e-2)
        for step in range(2):
            set_grads(params, step=step)
            optimizer.step()
        return snapshot(optimizer)

    one = run()
    monkeypatch.setattr(compiled, "_SHARE", 100)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert same_bits(one, run())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "other",
    [{"betas": (0.4, 0.9)}, {"states": "bf16"}, {"update": "kahan"}, {"update": "stochastic"}],
    ids=str,
)
def test_what_has_no_loop_is_made_in_torch_operations(other, runs):
    params = make_params(torch.bfloat16)
    optimizer = optim.AdamW(params, **other)
    set_grads(params)
    optimizer.step()
    assert not runs


def test_small_models_wait_for_no_compiler(monkeypatch):
    monkeypatch.setattr(compiled_steps, "_loop_for", lambda name, dtype: pytest.fail("compiled"))
    params = make_params(torch.bfloat16)
    set_grads(params)
    optim.AdamW(params).step()


def test_torch_counts_what_the_loop_writes(runs):
    params = make_params(torch.bfloat16)
    optimizer = optim.AdamW(params)
    set_grads(params)
    before = params[1]._version
    optimizer.step()
    assert runs
    assert params[1]._version > before


def test_a_loop_that_rounds_otherwise_is_not_used():
    loop = compiled_steps._loop_for("adamw", torch.bfloat16)

    def other(*args):
        *arrays, eps, size = args
        loop(*arrays, eps, type(size)(size * 1.0000001))

    assert compiled_steps._is_the_same("adamw", loop, torch.bfloat16)
    assert not compiled_steps._is_the_same("adamw", other, torch.bfloat16)


def test_a_loop_whose_roots_are_rarely_off_in_the_last_bit_is_not_used():
    """As the nearest numbers are where torch computes roots with Intel's MKL: 1 of 170 is another number there."""

    def other(*args):
        loop(*args)
        _, remainder, _, _, squares, *_ = args
        off = (squares.view("int32") % 60013 == 0).nonzero()[0]
        remainder[off] += remainder.dtype.type(1)

    loop = compiled_steps._loop_for("adamw", torch.bfloat16)
    assert not compiled_steps._is_the_same("adamw", other, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_loop_that_takes_its_roots_from_torch_has_torchs_bits_on_every_machine(dtype):
    from floatline.optim.kernels import steps_numba

    _, with_roots = steps_numba.STEPS["adamw", str(dtype)]
    assert compiled_steps._is_the_same("adamw", with_roots, dtype)


def wide_number(value):
    return torch.tensor(value).numpy()[()]


def multiplies_in_vectors(loop, *args):
    """Whether a loop's code has a multiplication of several float32 at once: x86's, NEON's or SVE's."""
    loop(*args)
    code = "".join(loop.inspect_asm().values())
    return bool(re.search(r"\bv?mulps\b|\bfmul\s+(v\d+\.4s|z\d+\.s)", code))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("name", "states", "numbers"), [("adamw", 2, 8), ("sgd", 0, 3), ("momentum", 1, 7)])
def test_loops_take_several_weights_at_once(name, states, numbers, dtype):
    """Six times slower otherwise, with the same bits."""
    from floatline.optim.kernels import steps_numba

    halves = [torch.zeros(1, dtype=torch.int16).numpy() for _ in range(3)]
    wide = [torch.zeros(1).numpy() for _ in range(states)]
    loop, *_ = steps_numba.STEPS[name, str(dtype)]
    assert multiplies_in_vectors(loop, *halves, *wide, *[wide_number(1.0)] * numbers)


def test_a_loop_whose_numbers_follow_one_another_takes_them_one_by_one():
    import numba

    @numba.njit
    def loop(numbers, factor):
        for i in range(1, numbers.size):
            numbers[i] = numbers[i - 1] * factor

    assert not multiplies_in_vectors(loop, torch.ones(4).numpy(), wide_number(2.0))
