"""HalfOnCPU against float64, against torch's own 16-bit kernels, and in every place a training step has."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from floatline.formats import find_format
from floatline.numerics.half_on_cpu import HalfOnCPU

DTYPES = (torch.float16, torch.bfloat16)
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _onednn_stays_on() -> Iterator[None]:
    # On CPUs without bfloat16, torch's own bfloat16 product turns oneDNN off for the whole process.
    before = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(before)


class Kernels(TorchDispatchMode):
    """Counts what reaches torch's kernels, with the dtype of the first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], Tensor):
            self.seen[f"{func.overloadpacket} {args[0].dtype}"] += 1
        return func(*args, **(kwargs or {}))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    fmt = find_format(dtype)
    exponent = torch.frexp(x.double())[1] - 1
    return torch.ldexp(torch.ones_like(exponent).double(), exponent.clamp_min(fmt.min_exponent) - fmt.mantissa_bits)


def leaves(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [r for r in result if isinstance(r, Tensor)]


def attention_backward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v)
    return torch.autograd.grad(out, (q, k, v), rand(*out.shape, seed=9).half().to(out))


def conv_backward(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    return torch.autograd.grad(F.conv2d(x, w, padding=1).sum(), (x, w))


Q = tuple(rand(2, 2, 12, 16, seed=s) for s in range(3))
IMAGE, KERNEL = rand(2, 8, 9, 9), rand(12, 8, 3, 3, seed=1) / 8
# What is computed: (function, inputs).
CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "mm": (torch.mm, (rand(17, 96), rand(96, 13, seed=1))),
    "mm transposed": (lambda a, b: torch.mm(a.t(), b.t()), (rand(96, 17), rand(13, 96, seed=1))),
    "mm strided": (lambda a, b: torch.mm(a[:, ::2], b[::2]), (rand(9, 96), rand(96, 7, seed=1))),
    "addmm": (torch.addmm, (rand(13), rand(17, 96), rand(96, 13, seed=1))),
    "addmm scaled": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
        (rand(17, 13), rand(17, 96), rand(96, 13, seed=1)),
    ),
    "bmm": (torch.bmm, (rand(3, 9, 32), rand(3, 32, 7, seed=1))),
    "bmm expanded": (lambda a, b: a @ b, (rand(3, 1, 9, 32), rand(2, 32, 7, seed=1))),
    "baddbmm": (torch.baddbmm, (rand(3, 9, 7), rand(3, 9, 32), rand(3, 32, 7, seed=1))),
    "addbmm": (torch.addbmm, (rand(9, 7), rand(3, 9, 32), rand(3, 32, 7, seed=1))),
    "mv": (torch.mv, (rand(9, 96), rand(96, seed=1))),
    "addmv": (torch.addmv, (rand(9), rand(9, 96), rand(96, seed=1))),
    "dot": (torch.dot, (rand(96), rand(96, seed=1))),
    "vdot": (torch.vdot, (rand(96), rand(96, seed=1))),
    "addr": (torch.addr, (rand(9, 7), rand(9), rand(7, seed=1))),
    "linear": (F.linear, (rand(4, 5, 32), rand(9, 32, seed=1), rand(9))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (rand(3, 5, 32), rand(3, 6, 32, seed=1))),
    "bilinear": (F.bilinear, (rand(5, 8), rand(5, 9, seed=1), rand(4, 8, 9))),
    "conv1d": (F.conv1d, (rand(2, 8, 20), rand(6, 8, 3, seed=1))),
    "conv2d": (F.conv2d, (IMAGE, KERNEL, rand(12))),
    "conv2d strided, dilated": (
        lambda x, w: F.conv2d(x, w, stride=2, dilation=2, padding=2),
        (IMAGE, KERNEL),
    ),
    "conv2d depthwise": (lambda x, w: F.conv2d(x, w, groups=8), (IMAGE, rand(8, 1, 3, 3))),
    "conv2d channels last": (F.conv2d, (IMAGE.to(memory_format=LAST), KERNEL.to(memory_format=LAST))),
    "conv2d image last": (F.conv2d, (IMAGE.to(memory_format=LAST), KERNEL)),
    "conv2d weight last": (F.conv2d, (IMAGE, KERNEL.to(memory_format=LAST))),
    "conv3d": (F.conv3d, (rand(1, 4, 6, 6, 6), rand(5, 4, 3, 3, 3, seed=1))),
    "conv_transpose2d": (F.conv_transpose2d, (IMAGE, rand(8, 5, 3, 3, seed=1))),
    "conv2d backward": (conv_backward, (IMAGE, KERNEL)),
    "attention": (F.scaled_dot_product_attention, Q),
    "attention, causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), Q),
    "attention, masked": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (*Q, rand(12, 12)),
    ),
    "attention backward": (attention_backward, Q),
    "gelu": (F.gelu, (rand(9, 33) * 3,)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_error_is_no_larger_than_the_native_kernels_and_the_layout_is_the_same(name, dtype):
    function, inputs = CALLS[name]
    inputs = tuple(x.to(dtype) for x in inputs)
    native = leaves(function(*inputs))
    with HalfOnCPU() as mode:
        ours = leaves(function(*inputs))
    exact = leaves(function(*(x.double() for x in inputs)))
    assert mode.computed
    for got, other, true in zip(ours, native, exact, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (other.dtype, other.shape, other.stride())
        unit = spacing(true.abs().max(), dtype)
        ours_off, native_off = ((x.double() - true).abs().max() / unit for x in (got, other))
        assert ours_off <= native_off + 0.01


def test_the_native_kernel_runs_without_the_mode_and_float32_with_it():
    a = rand(8, 8).half()
    with Kernels() as without:
        torch.mm(a, a)
    with Kernels() as within, HalfOnCPU() as mode:
        torch.mm(a, a)
    assert without.seen == {"aten.mm torch.float16": 1}
    assert within.seen["aten.mm torch.float32"] == 1
    assert "aten.mm torch.float16" not in within.seen
    assert mode.computed == {"aten.mm": 1}


# --- the stated bound -------------------------------------------------------------------------------


def assert_within_bound(result: Tensor, a: Tensor, b: Tensor) -> None:
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    bound = spacing(result, result.dtype) / 2 + 1.01 * a.shape[-1] * 2.0**-24 * sizes
    assert ((result.double() - exact).abs() <= bound).all()


def cancelling(num_products: int) -> tuple[Tensor, Tensor]:
    """Large terms that cancel, with a small remainder."""
    half = rand(4, num_products // 2) * 100
    a = torch.cat([half, half], dim=1)
    return a, torch.cat([torch.ones(num_products // 2, 3), -torch.ones(num_products // 2, 3)]) + rand(
        num_products, 3
    ) / 256


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (rand(5, 1), rand(1, 5, seed=1)),
        (rand(16, 64), rand(64, 16, seed=1)),
        (rand(4, 16384), rand(16384, 4, seed=1)),
        (rand(4, 16384).abs() / 64, rand(16384, 4, seed=1).abs() / 64),
        (rand(16, 64) * 2.0**-10, rand(64, 16, seed=1) * 2.0**-10),
        cancelling(512),
    ],
    ids=["one product", "short", "long", "long, all positive", "subnormal results", "cancelling"],
)
def test_sums_stay_within_the_stated_bound(a, b, dtype):
    a, b = a.to(dtype), b.to(dtype)
    with HalfOnCPU():
        assert_within_bound(a @ b, a, b)
        assert_within_bound(torch.stack([a @ b[:, i] for i in range(b.shape[1])], dim=1), a, b)
        kernels = b.t().reshape(b.shape[1], b.shape[0], 1, 1)
        assert_within_bound(F.conv2d(a[:, :, None, None], kernels)[:, :, 0, 0], a, b)


def test_the_bound_can_be_broken():
    a, b = (x.half() for x in cancelling(512))
    in_half = torch.zeros(4, 3, dtype=torch.float16)
    for k in range(512):
        in_half += a[:, k, None] * b[None, k]
    with pytest.raises(AssertionError):
        assert_within_bound(in_half, a, b)


def test_a_large_convolution_stays_within_the_stated_bound():
    # Large batches take other float32 algorithms (Winograd) where the CPU has them.
    x, w = rand(16, 16, 24, 24).half(), rand(16, 16, 3, 3, seed=1).half()
    with HalfOnCPU():
        result = F.conv2d(x, w)
    columns = F.unfold(x.double(), 3).mT
    assert_within_bound(result.flatten(2).mT, columns, w.double().flatten(1).t())


# --- range ------------------------------------------------------------------------------------------

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b: torch.mm(a[None], b[:, None])[0, 0],
    "addmm": lambda a, b: torch.addmm(torch.zeros(1, 1).to(a), a[None], b[:, None])[0, 0],
    "bmm": lambda a, b: torch.bmm(a[None, None], b[None, :, None])[0, 0, 0],
    "mv": lambda a, b: torch.mv(a[None], b)[0],
    "dot": torch.dot,
    "conv1d": lambda a, b: F.conv1d(a[None, :, None], b[None, :, None])[0, 0, 0],
    "conv2d": lambda a, b: F.conv2d(a[None, :, None, None], b[None, :, None, None])[0, 0, 0, 0],
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([65504, 15], [1, 1], 65504.0),
        ([65504, 16], [1, 1], float("inf")),
        ([256, 0], [-256, 0], float("-inf")),
        ([60000, 60000, -60000], [1, 1, 1], 60000.0),
        ([200] * 32 + [-200] * 32, [200] * 64, 0.0),
        ([2.0**-12, 0], [2.0**-12, 0], 2.0**-24),
        ([2.0**-13, 0], [2.0**-12, 0], 0.0),
        ([2.0**-13, 2.0**-13], [2.0**-12, 2.0**-12], 2.0**-24),
        ([float("inf"), 1], [0, 1], float("nan")),
        ([float("nan"), 1], [1, 1], float("nan")),
        ([float("inf"), 1], [1, 1], float("inf")),
    ],
)
def test_the_range_of_float16_is_kept(product, a, b, expected):
    with HalfOnCPU():
        result = product(torch.tensor(a).half(), torch.tensor(b).half())
    torch.testing.assert_close(result, torch.tensor(expected).half(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("product", [PRODUCTS["mm"], PRODUCTS["bmm"], PRODUCTS["dot"]])
@pytest.mark.parametrize("last", [15.0, 16.0, -131008.0])
def test_overflow_begins_where_the_native_product_overflows(product, last):
    if product is PRODUCTS["dot"] and torch.__version__.startswith("2.6."):
        pytest.skip("torch 2.6's own dot of FP16 rounds every product")
    a, b = torch.tensor([65504, last / 2]).half(), torch.tensor([1.0, 2.0]).half()
    native = product(a, b)
    with HalfOnCPU():
        assert torch.equal(product(a, b), native)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.new_zeros(0, 4) @ x,
        lambda x: x.new_zeros(3, 0) @ x.new_zeros(0, 5),
        lambda x: torch.addmm(x[0], x.new_zeros(2, 0), x.new_zeros(0, 4)),
        lambda x: torch.bmm(x.new_zeros(0, 2, 3), x.new_zeros(0, 3, 2)),
        lambda x: torch.dot(x.new_zeros(0), x.new_zeros(0)),
        lambda x: F.conv2d(x.new_zeros(0, 3, 5, 5), x.new_ones(4, 3, 3, 3)),
        lambda x: torch.addmm(x * float("nan"), x, x, beta=0),
    ],
)
def test_empty_sizes_and_unread_terms_are_as_native(call):
    x = rand(4, 4).half()
    native = call(x)
    with HalfOnCPU() as mode:
        result = call(x)
    assert mode.computed
    torch.testing.assert_close(result, native, rtol=1e-3, atol=1e-3)
    assert result.stride() == native.stride()


# --- forms of a call --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, c: c.addmm_(a, b),
        lambda a, b, c: c.addmm_(a, b, beta=0.5, alpha=2),
        lambda a, b, c: torch.mm(a, b, out=c),
        lambda a, b, c: torch.addmm(c, a, b, out=c),
        lambda a, b, c: torch.mm(a, b, out=c.new_empty(0)),
        lambda a, b, c: torch.mm(a, b, out=c.t()),
        lambda a, b, c: c[None].baddbmm_(a[None], b[None]),
        lambda a, b, c: torch.bmm(a[None], b[None], out=c[None]),
        lambda a, b, c: c.addbmm_(a[None], b[None]),
        lambda a, b, c: c[0].addmv_(a, b[0]),
        lambda a, b, c: c.addr_(a[0], b[0]),
    ],
)
def test_written_tensors_hold_what_the_native_call_writes(call):
    a, b, c = (rand(6, 6, seed=s).half() for s in range(3))
    expected, native = c.clone(), call(a, b, c.clone())
    call(a, b, expected)
    written = c.clone()
    with HalfOnCPU() as mode:
        result = call(a, b, written)
    assert mode.computed
    torch.testing.assert_close(written, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(result, native, rtol=2e-3, atol=2e-3)
    assert result.stride() == native.stride()


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asked", [False, True])
def test_the_grouped_product_of_experts_is_rounded_once(dtype, asked):
    rows, experts = rand(6, 16).to(dtype), rand(2, 16, 8, seed=1).to(dtype)
    with HalfOnCPU() as mode, torch.no_grad():
        found = torch._grouped_mm(
            rows, experts, offs=torch.tensor([2, 6], dtype=torch.int32), out_dtype=dtype if asked else None
        )
    exact = torch.cat([rows[:2].float() @ experts[0].float(), rows[2:].float() @ experts[1].float()])
    assert torch.equal(found, exact.to(dtype))
    assert mode.computed["aten._grouped_mm"] == 1


def test_an_in_place_call_returns_the_tensor_it_wrote():
    a, c = rand(4, 4).half(), rand(4, 4, seed=1).half()
    with HalfOnCPU():
        assert c.addmm_(a, a) is c


@pytest.mark.parametrize(
    "call",
    [
        lambda a: torch.mm(a, a.float()),
        lambda a: torch.mm(a, a.bfloat16()),
        lambda a: torch.mm(a, a, out=torch.empty(4, 4)),
        lambda a: torch.mm(a, a[:2]),
        lambda a: F.conv2d(a[None, None], a.float()[None, None]),
    ],
)
def test_wrong_calls_raise_as_without_the_mode(call):
    a = rand(4, 4).half()
    with pytest.raises(RuntimeError) as native:
        call(a)
    with HalfOnCPU(), pytest.raises(RuntimeError) as ours:
        call(a)
    assert type(ours.value) is type(native.value)


@pytest.mark.parametrize(
    "tensor",
    [
        rand(4, 4),
        rand(4, 4).double(),
        torch.arange(16).reshape(4, 4),
        rand(4, 4).to(torch.complex64),
        torch.empty(4, 4, dtype=torch.float16, device="meta"),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.device}",
)
def test_other_dtypes_and_devices_are_left_alone(tensor):
    with Kernels() as kernels, HalfOnCPU() as mode:
        result = tensor @ tensor
    assert not mode.computed
    assert kernels.seen == {f"aten.mm {tensor.dtype}": 1}
    assert (result.dtype, result.device) == (tensor.dtype, tensor.device)


def test_other_operations_are_left_alone():
    x = rand(4, 4).half()
    with Kernels() as kernels, HalfOnCPU() as mode:
        (x.exp() + x).sum()
    assert not mode.computed
    assert set(kernels.seen) == {"aten.exp torch.float16", "aten.add torch.float16", "aten.sum torch.float16"}


def test_tensor_subclasses_are_computed_inside():
    x = TwoTensor(rand(4, 4).half(), rand(4, 4, seed=1).half())
    with HalfOnCPU() as mode:
        result = x @ x
    assert isinstance(result, TwoTensor)
    assert mode.computed == {"aten.mm": 2}


# --- places in a training step ----------------------------------------------------------------------


def conv_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)),
        *(nn.ConvTranspose2d(8, 6, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5)),
    )


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, activation="gelu")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.plain = kind(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.layer(x)[0])[0]


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=self.use_reentrant)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder layer": (encoder_layer, (2, 8, 32)),
    "conv net": (conv_net, (4, 3, 10, 10)),
    "LSTM": (lambda: Recurrent(nn.LSTM), (2, 5, 8)),
    "GRU": (lambda: Recurrent(nn.GRU), (2, 5, 8)),
}


NAMES_IN_STEP = {
    *(
        "mkldnn_rnn_layer",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "mv",
        "dot",
        "convolution",
        "convolution_backward",
        "gelu",
    ),
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = model(x).float()
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    (out * weight).sum().backward()
    return [p.grad.float() for p in model.parameters() if p.grad is not None]


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    # Weights and input are rounded once, so that both precisions start from the same numbers.
    return make().half().float(), rand(*shape).half().float()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_agree_with_float32(name):
    model, x = build(name)
    expected = gradients(model, x)
    with Kernels() as kernels, HalfOnCPU() as mode:
        got = gradients(model.half(), x.half())
    reached = {seen for seen in kernels.seen if seen.split()[0].removeprefix("aten.") in NAMES_IN_STEP}
    assert reached
    assert all("torch.float32" in seen for seen in reached)
    assert sum(mode.computed.values()) == sum(kernels.seen[seen] for seen in reached)
    for ours, true in zip(got, expected, strict=True):
        assert (ours - true).norm() <= 0.01 * true.norm() + 0.01


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant):
    model, x = build("encoder layer")
    model, x = model.half(), x.half().requires_grad_()
    with HalfOnCPU():
        plain = gradients(model, x)
        recomputed = gradients(Checkpointed(model, use_reentrant), x)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_autocast_is_covered():
    model, x = build("encoder layer")
    with HalfOnCPU() as mode, torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
        forward = mode.computed.total()
        out.float().sum().backward()
    assert mode.computed["aten.addmm"] > 0
    assert mode.computed.total() > forward
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_is_covered(name, context):
    model, x = build(name)
    model.eval()
    with context():
        expected = model(x)
        with Kernels() as kernels, HalfOnCPU() as mode:
            result = model.half()(x.half())
    assert mode.computed
    native = {s for s in kernels.seen if s.endswith("16") and s.split()[0].removeprefix("aten.") in NAMES_IN_STEP}
    assert not native
    torch.testing.assert_close(result.float(), expected, rtol=0.02, atol=0.02)


def test_a_score_that_overflows_stays_visible_in_the_fast_path_of_attention():
    # One kernel for a whole layer: float32 all through would hide an inf between its products.
    attention = nn.MultiheadAttention(8, 1, batch_first=True).half().eval()
    x = torch.full((1, 2, 8), 300.0).half()
    with torch.no_grad():
        for p in attention.parameters():
            p.fill_(1.0)
        with HalfOnCPU() as mode:
            result, _ = attention(x, x, x)
    assert mode.computed["aten.bmm"] == 2
    assert result.isnan().all()


def test_a_mode_within_a_mode_changes_nothing():
    a = rand(8, 8).half()
    with HalfOnCPU() as outer:
        once = a @ a
        with HalfOnCPU() as inner:
            twice = a @ a
    assert torch.equal(once, twice)
    assert (outer.computed.total(), inner.computed.total()) == (1, 1)


def test_backward_is_covered_inside_the_with_and_not_outside():
    a = rand(8, 8).half().requires_grad_()
    with HalfOnCPU() as inside:
        (a @ a).sum().backward()
    with HalfOnCPU() as outside:
        loss = (a @ a).sum()
    loss.backward()
    assert inside.computed == {"aten.mm": 3}
    assert outside.computed == {"aten.mm": 1}


def test_other_threads_are_outside():
    a = rand(8, 8).half()
    with HalfOnCPU() as mode:
        thread = threading.Thread(target=lambda: a @ a)
        thread.start()
        thread.join()
        assert not mode.computed
        assert (a @ a).dtype == torch.float16
    assert mode.computed == {"aten.mm": 1}


def test_an_error_inside_ends_the_mode():
    a = rand(8, 8).half()
    with pytest.raises(ZeroDivisionError), HalfOnCPU():
        raise ZeroDivisionError
    with Kernels() as kernels:
        a @ a
    assert kernels.seen == {"aten.mm torch.float16": 1}


def num_computed(modes: list[TorchDispatchMode]) -> int:
    before = sum(sum(mode.computed.values()) for mode in modes if isinstance(mode, HalfOnCPU))
    torch.ones(2, 2, dtype=torch.float16) @ torch.ones(2, 2, dtype=torch.float16)
    return sum(sum(mode.computed.values()) for mode in modes if isinstance(mode, HalfOnCPU)) - before


def test_entered_by_hand_it_holds_until_left_though_nobody_keeps_it():
    HalfOnCPU().__enter__()
    gc.collect()
    modes = _get_current_dispatch_mode_stack()
    try:
        assert num_computed(modes) == 1
    finally:
        modes[-1].__exit__(None, None, None)
    assert num_computed(modes) == 0
