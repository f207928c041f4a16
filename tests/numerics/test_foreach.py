"""Operations on lists of tensors: the loops that stand in for torch's private names give torch's bits."""

import pytest
import torch

from floatline.numerics import foreach


def lists(dtype, num=3):
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(5, 3, generator=generator).to(dtype) for _ in range(4)] for _ in range(num)]


CASES = {
    "add": lambda a, b, c: ((a, b), {"alpha": 0.3}),
    "mul": lambda a, b, c: ((a, torch.tensor(0.7)), {}),
    "neg": lambda a, b, c: ((a,), {}),
    "sqrt": lambda a, b, c: (([x.abs() for x in a],), {}),
    "norm": lambda a, b, c: ((a, 2), {}),
    "add_": lambda a, b, c: ((a, 1e-8), {}),
    "addcdiv_": lambda a, b, c: ((a, b, [x.abs() + 1 for x in c], [-0.1, -0.2, -0.3, -0.4]), {}),
    "addcmul_": lambda a, b, c: ((a, b, c, 0.1), {}),
    "copy_": lambda a, b, c: ((a, b), {}),
    "div_": lambda a, b, c: ((a, [0.5, 0.7, 0.9, 1.1]), {}),
    "lerp_": lambda a, b, c: ((a, b, 0.1), {}),
    "mul_": lambda a, b, c: ((a, 0.99), {}),
    "sign_": lambda a, b, c: ((a,), {}),
}


HALF = [(name, torch.float16) for name in ("mul", "neg", "norm", "copy_")]  # what 16-bit tensors are given to


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CASES), *HALF])
def test_a_loop_has_the_bits_of_torchs_own_operation(name, dtype):
    results = []
    for operation in (getattr(torch, f"_foreach_{name}"), foreach.loop(name)):
        args, options = CASES[name](*lists(dtype))
        made = operation(*args, **options)
        results.append(args[0] if name.endswith("_") else made)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    untouched = CASES[name](*lists(dtype))[0][0]
    assert not all(torch.equal(x, y) for x, y in zip(results[0], untouched, strict=True))


def test_every_operation_that_the_module_offers_is_checked_above():
    offered = {name for name, value in vars(foreach).items() if callable(value) and name.strip("_") in foreach_names()}
    assert offered == set(CASES)


def foreach_names():
    return {name.removeprefix("_foreach_").strip("_") for name in dir(torch) if name.startswith("_foreach_")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("inverse", [1.0, 1 / 1024])
def test_unscaling_by_a_loop_is_torchs(dtype, bad, inverse):
    found, grads = [], []
    for unscale in (torch._amp_foreach_non_finite_check_and_unscale_, foreach.check_and_unscale_by_loop):
        own, flag = lists(dtype)[0], torch.zeros(1)
        if bad is not None:
            own[1][2, 2] = bad
        unscale(own, flag, torch.tensor([inverse]))
        found.append(flag.item())
        grads.append(own)
    assert found == [float(bad is not None)] * 2
    assert all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(*grads, strict=True))


def test_without_torchs_operations_the_optimizers_step_is_the_same(monkeypatch):
    import floatline as fl

    def train():
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(6, 4))
        optimizer = fl.optim.AdamW([weight], lr=0.1)
        for _ in range(3):
            weight.grad = weight.detach() * 0.5
            optimizer.step(clip_norm=0.1)
        return weight.detach()

    expected = train()
    for name in [name for name in dir(torch) if name.startswith(("_foreach_", "_amp_foreach_"))]:
        monkeypatch.delattr(torch, name)
    assert torch.equal(train(), expected)
    monkeypatch.setattr(foreach, "loop", lambda name: lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # it was the loops that did it
        train()
