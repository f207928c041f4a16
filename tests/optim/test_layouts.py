"""Shapes, strides and sizes: how tensors lie in memory, and how they are cut into waves, changes nothing."""

import pytest
import torch
from tests.optim.steps import HALVES, make_params, masters, same_bits, set_grads, snapshot

from floatline import optim
from floatline.errors import OptimizerError
from floatline.numerics.rounding import round_stochastic
from floatline.optim.kernels import waves

FORMS = [
    {"update": "exact", "states": "fp32"},
    {"update": "stochastic", "states": "fp32"},
    {"update": "kahan", "states": "bf16"},
    {"update": "exact", "states": "int8"},
]


def steps(params, count=3, **settings):
    optimizer = optim.AdamW(params, lr=1e-3, **settings)
    for step in range(count):
        set_grads(params, step=step)
        optimizer.step(clip_norm=1.0)
    return optimizer


@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_small_waves_give_the_bits_of_large_ones(settings, monkeypatch):
    shapes = [(3,), (700,), (0,), (1, 1), (513,), (40, 33)]
    large = snapshot(steps(make_params(torch.bfloat16, shapes=shapes), **settings))
    monkeypatch.setattr(waves, "WAVE", 512)
    small = snapshot(steps(make_params(torch.bfloat16, shapes=shapes), **settings))
    assert same_bits(large, small)


def test_waves_cover_every_element_once(monkeypatch):
    monkeypatch.setattr(waves, "WAVE", 512)
    params = make_params(torch.bfloat16, shapes=[(3,), (2000,), (513,)])
    optimizer = steps(params, count=1)
    parts = [waves.WavePart(optim.optimizer.Entry(p, p.grad, {}, {}, 0, 0), 1.0, {}) for p in params]
    for padded in (False, True):
        covered = {id(part): [] for part in parts}
        for wave in waves.cut_into_waves(parts, padded=padded):
            assert sum(wave.widths) <= 512
            for s in wave.slices:
                assert s.low % 256 == 0
                covered[id(s.part)] += range(s.low, s.low + s.size)
        for part in parts:
            assert covered[id(part)] == list(range(part.entry.weight.numel()))
    assert optimizer.decision.applied


@pytest.mark.parametrize("settings", FORMS, ids=str)
@pytest.mark.parametrize("kind", ["channels last", "transposed", "with gaps"])
def test_strides_do_not_change_the_numbers(kind, settings):
    start = make_params(torch.float16, shapes=[(4, 6, 5, 3)])[0].detach()
    views = {
        "channels last": lambda x: x.clone(memory_format=torch.channels_last),
        "transposed": lambda x: x.clone().transpose(0, 1).contiguous().transpose(0, 1),
        "with gaps": lambda x: torch.zeros(4, 6, 5, 6, dtype=x.dtype)[..., ::2].copy_(x),
    }
    plain = torch.nn.Parameter(start.clone())
    other = torch.nn.Parameter(views[kind](start))
    assert not other.is_contiguous()
    optimizers = [optim.AdamW([p], lr=1e-3, **settings) for p in (plain, other)]
    for step in range(3):
        set_grads([plain], [other], step=step)
        for optimizer in optimizers:
            optimizer.step(scale=2.0)
    if settings["update"] == "exact" and settings["states"] == "fp32":
        assert torch.equal(*[masters(o)[0] for o in optimizers])
    # Random choices and blocks follow the order in memory: three roundings of 2**-10 apart at most.
    assert torch.allclose(plain.float(), other.float(), rtol=4e-3, atol=0)


def test_a_memory_format_changed_in_between_is_refused_not_mixed_up():
    param = torch.nn.Parameter(torch.ones(4, 6, 5, 3, dtype=torch.float16))
    optimizer = steps([param], count=1)
    param.data = param.data.to(memory_format=torch.channels_last)
    set_grads([param])
    with pytest.raises(OptimizerError, match="strides"):
        optimizer.step()


def test_parameters_without_gradient_are_untouched():
    params = make_params(torch.bfloat16)
    optimizer = optim.AdamW(params)
    set_grads(params)
    params[1].grad = None
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(before, params[1])
    assert not optimizer.state[params[1]]
    assert float(optimizer.state[params[0]]["step"]) == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_weights_are_round_stochastic_under_their_key(dtype):
    params = make_params(dtype, shapes=[(5,), (1001,)])
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = optim.SGD(params, lr=0.1, update="stochastic", seed=77)
    reference = optim.SGD(wide, lr=0.1)
    set_grads(params, wide)
    optimizer.step()
    reference.step()
    for stream, (param, exact) in enumerate(zip(params, wide, strict=True)):
        name = str(dtype).removeprefix("torch.")
        expected = round_stochastic(exact, name, seed=77, step=1, stream=stream)
        assert torch.equal(param.detach().float(), expected)
