"""as_fp32 and as_bf16: whatever the code asks for, the numbers are of that precision; afterwards all is as before."""

import pytest
import torch
from torch import nn

from floatline.probe.steps.other_precision import as_bf16, as_fp32

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
CASTS = {
    "half()": lambda: X.half(),
    "bfloat16()": lambda: X.bfloat16(),
    "to": lambda: X.to(torch.float16),
    "type": lambda: X.type(torch.float16),
    "zeros": lambda: torch.zeros(3, dtype=torch.float16),
    "tensor": lambda: torch.tensor([1.0, 0.1], dtype=torch.float16),
    "empty_like": lambda: torch.empty_like(X, dtype=torch.bfloat16),
    "sum": lambda: X.sum(dtype=torch.float16),
    "module": lambda: nn.Linear(3, 3).half().weight,
    "module.to": lambda: nn.Linear(3, 3).to(torch.bfloat16).weight,
}


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated(model):
    return model(X)


def autocast_output():
    with torch.autocast("cpu", dtype=torch.float16):
        return nn.Linear(6, 2)(X)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts_give_float32(cast):
    assert cast().dtype in (torch.float16, torch.bfloat16)
    with as_fp32():
        assert cast().dtype == torch.float32


def test_casts_to_half_give_bfloat16_and_float32_stays():
    with as_bf16():
        assert CASTS["half()"]().dtype == torch.bfloat16
        assert CASTS["tensor"]().dtype == torch.bfloat16
        assert torch.zeros(3).dtype == torch.float32


def test_values_are_not_rounded_on_the_way():
    with as_fp32():
        assert torch.equal(X.half().float(), X)
    assert not torch.equal(X.half().float(), X)


def test_autocast_stays_off_also_as_a_decorator_made_before():
    model = nn.Linear(6, 2)
    assert decorated(model).dtype == torch.bfloat16
    with as_fp32():
        assert decorated(model).dtype == torch.float32
        assert autocast_output().dtype == torch.float32


def test_half_autocast_becomes_bfloat16():
    assert autocast_output().dtype == torch.float16
    with as_bf16():
        assert autocast_output().dtype == torch.bfloat16


def test_an_open_autocast_region_is_closed_inside_and_open_again_after():
    model = nn.Linear(6, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with as_fp32():
            assert model(X).dtype == torch.float32
        assert model(X).dtype == torch.bfloat16


def test_a_scaler_acts_as_disabled_also_one_made_before():
    before = torch.amp.GradScaler("cpu")
    with as_fp32():
        for scaler in (before, torch.amp.GradScaler("cpu")):
            assert scaler.get_scale() == 1.0
            assert not scaler.is_enabled()
            assert float(scaler.scale(torch.ones(()))) == 1.0
    assert before.get_scale() == 65536.0
    assert float(before.scale(torch.ones(()))) == 65536.0


def test_a_custom_function_with_custom_fwd_runs_in_float32():
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    x = X.clone().requires_grad_()
    with as_fp32(), torch.autocast("cpu", dtype=torch.float16):
        out = Square.apply(x)
    out.sum().backward()
    assert out.dtype == torch.float32
    assert torch.equal(x.grad, 2 * X)


def test_half_tensors_made_before_are_widened_where_they_are_read():
    old = X.half()
    with as_fp32():
        assert (old @ old.T).dtype == torch.float32
    assert (old @ old.T).dtype == torch.float16


def test_a_default_dtype_of_half_is_overruled():
    try:
        with as_fp32():
            torch.set_default_dtype(torch.float16)
            assert torch.zeros(2).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_left_behind_even_after_an_error():
    before = {
        name: vars(torch).get(name) for name in ("set_autocast_enabled", "set_autocast_dtype", "set_default_dtype")
    }
    for context in (as_fp32, as_bf16):
        with pytest.raises(ZeroDivisionError), context():
            raise ZeroDivisionError
    assert {name: vars(torch).get(name) for name in before} == before
    assert "_enabled" not in vars(torch.amp.GradScaler)
    assert CASTS["half()"]().dtype == torch.float16


def test_the_check_above_can_fail():
    with as_fp32():
        assert "_enabled" in vars(torch.amp.GradScaler)
