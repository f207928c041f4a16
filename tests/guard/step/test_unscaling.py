"""Unscaling in every dtype: what is exact, what is refused, what is seen."""

import pytest
import torch
from tests.guard.loops import backward, make_params
from torch import nn

import floatline as fl
from floatline.errors import ScalerError
from floatline.guard.step import unscaling

SCALES = [2.0**k for k in range(0, 25, 4)]
CAN_WIDEN = hasattr(torch.Tensor, "grad_dtype")
needs_grad_dtype = pytest.mark.skipif(not CAN_WIDEN, reason="this torch has no Tensor.grad_dtype")


def every_fp16():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.float16)
    return values[values.isfinite()]


def param_with_grad(grad):
    param = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    param.grad = grad.clone()
    return param


def ready(scale):
    scaler = fl.LossScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    return scaler


@needs_grad_dtype
@pytest.mark.parametrize("scale", SCALES)
def test_unscaled_fp16_gradients_lose_nothing(scale):
    grad = every_fp16()
    param = param_with_grad(grad)
    ready(scale).unscale_(fl.optim.SGD([param], lr=0.1))
    assert param.grad.dtype == torch.float32
    assert torch.equal(param.grad.double() * scale, grad.double())


def test_unscaled_in_fp16_they_would_be_lost():
    grad = every_fp16()
    unscaled = (grad.float() / 65536).half()
    assert (unscaled[grad.abs() < 1.9e-3] == 0).all()
    assert (unscaled.float() * 65536 != grad.float()).float().mean() > 0.5


@needs_grad_dtype
def test_fp16_weights_clip_and_step_after_unscale():
    params, reference = make_params(torch.float16), make_params(torch.float16)
    optimizer, other = fl.optim.AdamW(params, lr=0.01), fl.optim.AdamW(reference, lr=0.01)
    scaler, twin = fl.LossScaler("cpu"), fl.LossScaler("cpu")
    for step in range(4):
        optimizer.zero_grad()
        backward(scaler, params, step, size=1e-6)
        assert params[0].grad.dtype == torch.float16
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(params, 1e-6)
        assert 1e-7 < float(norm) < 1e-5
        scaler.step(optimizer)
        scaler.update()
        other.zero_grad()
        backward(twin, reference, step, size=1e-6)
        twin.step(other, clip_norm=1e-6)
        twin.update()
    for one, two in zip(params, reference, strict=True):
        assert torch.allclose(one.float(), two.float(), rtol=1e-3)
    assert not torch.equal(params[0], make_params(torch.float16)[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.AdamW(params, fused=True),
    ],
)
def test_fp16_gradients_of_other_optimizers_are_refused_with_what_to_do(make):
    params = make_params(torch.float16)
    optimizer, scaler = make(params), fl.LossScaler("cpu")
    backward(scaler, params, 0, size=1e-6)
    before = [p.grad.clone() for p in params]
    with pytest.raises(ScalerError, match=r"^Attempting to unscale FP16 gradients\..*clip_norm=1.0.*float32\.$"):
        scaler.unscale_(optimizer)
    assert isinstance(ScalerError(), ValueError)  # what torch raises
    assert all(torch.equal(p.grad, grad) for p, grad in zip(params, before, strict=True))


def test_an_old_torch_refuses_too(monkeypatch):
    monkeypatch.setattr(unscaling, "hasattr", lambda *_: False, raising=False)
    params = make_params(torch.float16)
    scaler = fl.LossScaler("cpu")
    backward(scaler, params, 0, size=1e-6)
    with pytest.raises(ScalerError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(fl.optim.AdamW(params))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_train_as_float32_ones(dtype):
    params, wide = make_params(dtype), [nn.Parameter(p.detach().float()) for p in make_params(dtype)]
    optimizer, reference = fl.optim.AdamW(params, lr=1e-4), fl.optim.AdamW(wide, lr=1e-4)
    model = nn.ParameterList(params)
    scaler, plain = fl.LossScaler("cpu", growth_interval=2), torch.amp.GradScaler("cpu", enabled=False)
    for step, bad in enumerate([None, None, float("inf"), None, None, None]):
        optimizer.zero_grad()
        # In FP16, unscaled gradients of this size are zero.
        backward(scaler, params, step, bad=bad, size=2e-8)
        scaler.step(optimizer)
        assert scaler.applied == (bad is None)
        scaler.update()
        if bad is None:
            reference.zero_grad()
            backward(plain, wide, step, size=2e-8)
            reference.step()
    master = optimizer.master_state_dict(model)
    for i, param in enumerate(wide):
        assert not torch.equal(param, make_params(dtype)[i].float())
        torch.testing.assert_close(master[str(i)], param.detach(), rtol=0, atol=1e-5)


def test_fp16_weights_take_torchs_fused_optimizer_without_unscale():
    params = make_params(torch.float16)
    optimizer, scaler = torch.optim.SGD(params, lr=0.1, fused=True), fl.LossScaler("cpu")
    backward(scaler, params, 0, size=1e-3)
    scaled = params[0].grad.clone()
    scaler.step(optimizer)
    expected = make_params(torch.float16)[0].float() - 0.1 * scaled.float() / 65536
    assert torch.allclose(params[0].float(), expected, rtol=1e-3)


def test_large_bf16_gradients_go_through_in_slices(monkeypatch):
    monkeypatch.setattr(unscaling, "_CHUNK", 100)
    sizes = [(7,), (250,), (3, 40), (0,), (99,), (60,), (30,), (30,)]
    grads = [torch.randn(size).bfloat16() for size in sizes]
    turned = torch.randn(40, 30).bfloat16().t()  # no flat view
    params = [param_with_grad(grad) for grad in grads]
    params.append(nn.Parameter(torch.zeros_like(turned)))
    params[-1].grad = turned.clone(memory_format=torch.preserve_format)
    for part in unscaling._chunks([p.grad for p in params[:-1]]):
        assert sum(piece.numel() for piece in part) <= 100 or len(part) == 1
    scaler = ready(48.0)
    scaler.unscale_(torch.optim.SGD(params))
    inverse = torch.tensor(1 / 48.0)
    for param, grad in zip(params, [*grads, turned], strict=True):
        assert torch.equal(param.grad, (grad.float() * inverse).bfloat16())


@pytest.mark.parametrize("place", [0, 99, 100, 249])
def test_a_nan_in_any_slice_is_seen(monkeypatch, place):
    monkeypatch.setattr(unscaling, "_CHUNK", 100)
    grad = torch.ones(250).bfloat16()
    grad[place] = float("nan")
    param = param_with_grad(grad)
    scaler = ready(16.0)
    scaler.step(torch.optim.SGD([param], lr=0.1))
    assert not scaler.applied
    assert torch.equal(param, torch.zeros(250).bfloat16())


def test_a_step_of_a_fused_optimizer_leaves_bf16_gradients_scaled():
    param = param_with_grad(torch.ones(4).bfloat16())
    scaler = ready(16.0)
    scaler.step(fl.optim.SGD([param], lr=0.1))
    assert torch.equal(param.grad, torch.ones(4).bfloat16())


@pytest.mark.parametrize("bad", [None, float("inf")])
def test_sparse_gradients_are_unscaled_and_checked_as_by_torch(bad):
    results = []
    for scaler in (fl.LossScaler("cpu"), torch.amp.GradScaler("cpu")):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(table(torch.tensor([1, 1, 7])).square().sum()).backward()
            if bad is not None and step == 1:
                table.weight.grad._values()[0, 0] = bad
            scaler.step(optimizer)
            scaler.update()
        results.append((table.weight.detach().clone(), scaler.get_scale()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == (65536.0 if bad is None else 32768.0)


def test_sparse_fp16_entries_that_overflow_together_are_seen():
    table = nn.Embedding(10, 2, sparse=True).half()
    scaler = ready(1.0)
    table(torch.tensor([3, 3])).backward(torch.full((2, 2), 60000.0, dtype=torch.float16))
    optimizer = torch.optim.SparseAdam(table.parameters())
    found = scaler._check_inf_per_device(optimizer)
    assert [float(flag) for flag in found.values()] == [1.0]


def test_mixed_dtypes_are_unscaled_together():
    grads = [torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    params = [param_with_grad(grad) for grad in grads]
    scaler = ready(4.0)
    scaler.unscale_(torch.optim.SGD(params))
    assert [p.grad.tolist() for p in params] == [[0.25] * 3] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [fl.optim.AdamW, lambda params: torch.optim.AdamW(params, fused=True)])
def test_on_a_gpu_the_host_waits_for_nothing(dtype, make):
    params = [nn.Parameter(torch.randn(1000, device="cuda").to(dtype)) for _ in range(3)]
    optimizer, scaler = make(params), fl.LossScaler("cuda", hysteresis=2)
    flags, bad = [], torch.tensor(float("nan"), device="cuda")
    for step in range(6):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        scaler.scale(sum(p.float().sum() for p in params) * 1e-6).backward()
        if step == 4:
            params[1].grad[:1].copy_(bad)
        scaler.step(optimizer)
        scaler.update()
        flags.append(scaler.applied_flag)
    torch.cuda.set_sync_debug_mode("default")
    assert [float(flag) for flag in flags] == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert all(p.isfinite().all() for p in params)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("bad_device", [None, "cpu", "cuda"])
def test_gradients_on_two_devices_are_unscaled_and_judged_together(bad_device):
    params = {device: nn.Parameter(torch.ones(3, device=device)) for device in ("cpu", "cuda")}
    scaler = fl.LossScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    for device, param in params.items():
        param.grad = torch.full_like(param, float("nan") if device == bad_device else 8.0)
    scaler.step(torch.optim.SGD(params.values(), lr=0.5))
    assert scaler.applied == (bad_device is None)
    assert all(p.tolist() == [0.5 if bad_device is None else 1.0] * 3 for p in params.values())
