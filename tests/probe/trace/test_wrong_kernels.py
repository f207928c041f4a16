"""Planted wrong kernels are named, each with its right twin that is not."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.marks import judges_kernels
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from floatline.diagnosis.detectors.kernels import find_wrong_kernels
from floatline.probe.trace.recorder import Recorder
from floatline.probe.trace.trace import Trace

pytestmark = judges_kernels
GENERATOR = torch.Generator().manual_seed(32)
DEVICE = "cpu"  # tools/kernel_bounds.py plants them on a GPU
SIXTEEN = (torch.float16, torch.bfloat16)


def data(*shape, dtype):
    return torch.randn(shape, generator=GENERATOR).to(DEVICE, dtype)


class Replaced(TorchDispatchMode):
    """Another kernel for one operation of torch, where it gives 16 bits."""

    def __init__(self, name, kernel):
        super().__init__()
        self.name, self.kernel, self.calls = name, kernel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        narrow = any(isinstance(a, torch.Tensor) and a.dtype in SIXTEEN for a in args)
        narrow = narrow or (kwargs or {}).get("dtype") in SIXTEEN
        if func._schema.name != self.name or not narrow:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self.kernel(func, list(args), kwargs or {})


def in_fp64(func, args, kwargs):
    """A right kernel: in FP64, rounded once."""
    form = kwargs.get("dtype") or next(a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in SIXTEEN)
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    given = func(*wide, **{**kwargs, **({"dtype": torch.float64} if "dtype" in kwargs else {})})
    if isinstance(given, tuple):
        return given[0].to(form), *(t.float() if isinstance(t, torch.Tensor) else t for t in given[1:])
    return given.to(form)


def changed(change):
    """A kernel that is right but for what is done to its result: a function of the result and the arguments."""

    def kernel(func, args, kwargs):
        given = in_fp64(func, args, kwargs)
        rest = given[1:] if isinstance(given, tuple) else ()
        own = change(given[0] if rest else given, args).to((given[0] if rest else given).dtype)
        return (own, *rest) if rest else own

    return kernel


def given_other(change):
    """A right kernel of changed arguments."""
    return lambda func, args, kwargs: in_fp64(func, *change(list(args), dict(kwargs)))


def patch(x, place, value):
    x = x.clone()
    x[place] = value
    return x


def sum_in_16_bits(first, second):
    total = first.new_zeros(first.shape[0], second.shape[1])
    for k in range(first.shape[1]):
        total = total + first[:, k : k + 1] * second[k : k + 1]
    return total


def truncated(result, args, exact):
    """Rounded towards 0."""
    own = result.float()
    far = own.abs() > exact.abs()
    return torch.where(far, torch.nextafter(result, torch.zeros_like(result)), result)


def attend_by_hand(q, k, v, *, hide, scale=None):
    scores = q.double() @ k.double().mT * (scale or 1 / math.sqrt(q.shape[-1]))
    return scores.masked_fill(hide, -math.inf).softmax(-1) @ v.double()


def causal(x, offset=1):
    return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(offset)


def stale_maximum(out, args):
    """Online softmax whose first block keeps the maximum it had: its part is too large by a constant."""
    q, k, v = (a.double() for a in args[:3])
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    half = k.shape[-2] // 2
    first, both = scores[..., :half].amax(-1, keepdim=True), scores.amax(-1, keepdim=True)
    weights = torch.cat([(scores[..., :half] - first).exp(), (scores[..., half:] - both).exp()], -1)
    return weights @ v / weights.sum(-1, keepdim=True)


def stale_deviation(out, args):
    deviation = args[0].float().std(1)
    return patch(out, 7, (out[7] * (deviation[6] / deviation[7])).to(out.dtype))


def without_the_last(out, args):
    return attend_by_hand(*args[:3], hide=patch(causal(args[0]), (39, 39), True))


def with_a_stale_scale(out, args):
    return attend_by_hand(*args[:3], hide=torch.zeros(40, 40, dtype=torch.bool), scale=1 / math.sqrt(20))


def uncounted_collisions(func, args, kwargs):
    own, _, index, source = args
    own = own.clone()
    own[index] = own[index] + source  # of what comes to one place, the last stays
    return own


def one_after_the_other(x):
    total = torch.zeros_like(x[0])
    for row in x:
        total = total + row
    return total


MM, ADDMM, CONV = "aten::mm", "aten::addmm", "aten::convolution"
SOFTMAX, LOG_SOFTMAX, NORM = "aten::_softmax", "aten::_log_softmax", "aten::native_layer_norm"
FLASH, BMM = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::bmm"


def mm(d):
    return torch.mm(data(24, 200, dtype=d), data(200, 33, dtype=d))


def attend(d):
    return F.scaled_dot_product_attention(*(data(2, 2, 40, 16, dtype=d) for _ in range(3)), is_causal=True)


def attend_to_all(d):
    return F.scaled_dot_product_attention(*(2 * data(2, 2, 40, 16, dtype=d) for _ in range(3)))


def norm(d):
    return F.layer_norm(data(30, 64, dtype=d) * 0.1, (64,), data(64, dtype=d), data(64, dtype=d))


PLANTS = {
    "truncated accumulation": (MM, mm, given_other(lambda a, k: ([a[0][:, :-8], a[1][:-8]], k))),
    "sums in 16 bits": (MM, mm, lambda func, args, kwargs: sum_in_16_bits(*args)),
    "row of the tile before": (MM, mm, changed(lambda out, args: patch(out, -1, out[-2]))),
    "tail left as zeros": (MM, mm, changed(lambda out, args: patch(out, (slice(None), slice(32, None)), 0.0))),
    "tail not initialised": (MM, mm, changed(lambda out, args: patch(out, (-1, -1), math.nan))),
    "one element of a tile": (MM, mm, changed(lambda out, args: patch(out, (16, 16), out[16, 15]))),
    "stale operand of a batch": (
        BMM,
        lambda d: torch.bmm(data(3, 8, 50, dtype=d), data(3, 50, 8, dtype=d)),
        changed(lambda out, args: patch(out, 2, (args[0][2].double() @ args[1][1].double()).to(out.dtype))),
    ),
    "bias left out": (
        ADDMM,
        lambda d: torch.addmm(0.1 * data(9, dtype=d), data(7, 30, dtype=d), data(30, 9, dtype=d)),
        changed(lambda out, args: args[1].double() @ args[2].double()),
    ),
    "edge without padding": (
        CONV,
        lambda d: F.conv2d(data(2, 4, 9, 9, dtype=d), data(6, 4, 3, 3, dtype=d), padding=1),
        changed(lambda out, args: patch(out, (..., -1), out[..., -2])),
    ),
    "softmax whose sum lacks a tail": (
        SOFTMAX,
        lambda d: data(12, 37, dtype=d).softmax(-1),
        changed(lambda out, args: out.double() / out[:, :32].double().sum(1, keepdim=True)),
    ),
    "log-softmax whose sum lacks an element": (
        LOG_SOFTMAX,
        lambda d: (0.01 * data(4, 30, dtype=d)).log_softmax(-1),
        changed(lambda out, args: args[0].double() - args[0].double()[:, :-8].logsumexp(1, keepdim=True)),
    ),
    "norm with the deviation of another row": (NORM, norm, changed(stale_deviation)),
    "norm with another eps": (NORM, norm, given_other(lambda a, k: ([*a[:4], 1e-3], k))),
    "mask shifted by one": (
        FLASH,
        attend,
        changed(lambda out, args: attend_by_hand(*args[:3], hide=causal(args[0], 2))),
    ),
    "wrong mask in one row": (
        FLASH,
        attend,
        changed(lambda out, args: attend_by_hand(*args[:3], hide=patch(causal(args[0]), (17, 3), True))),
    ),
    "missing causal element": (FLASH, attend, changed(without_the_last)),
    "stale scale": (FLASH, attend_to_all, changed(with_a_stale_scale)),
    "stale maximum": (FLASH, attend_to_all, changed(stale_maximum)),
    "cast that rounds towards zero": (
        "aten::_to_copy",
        lambda d: data(50, dtype=torch.float32).to(d),
        changed(lambda out, args: truncated(out, args, args[0])),
    ),
    "sum that rounds towards zero": (
        "aten::add",
        lambda d: data(50, dtype=d) + data(50, dtype=d),
        changed(lambda out, args: truncated(out, args, args[0].double() + args[1].double())),
    ),
    "reduction in 16 bits": (
        "aten::sum",
        lambda d: data(4096, 3, dtype=d).abs().sum(0),
        changed(lambda out, args: one_after_the_other(args[0])),
    ),
    "collisions lost": (
        "aten::index_add",
        lambda d: data(4, 6, dtype=d).index_add(0, torch.arange(20, device=DEVICE) % 4, data(20, 6, dtype=d)),
        uncounted_collisions,
    ),
    "row of an embedding off by one": (
        "aten::embedding",
        lambda d: F.embedding(torch.arange(10, device=DEVICE), data(12, 8, dtype=d)),
        changed(lambda out, args: patch(out, -1, args[0][8])),
    ),
    "exp of a coarse table": (
        "aten::exp",
        lambda d: data(60, dtype=d).exp(),
        changed(lambda out, args: out.float() * (1 + 2 * torch.finfo(out.dtype).eps)),
    ),
}


def record(name, call, kernel, dtype) -> Trace:
    other = Replaced(name, kernel)
    with other, Recorder(nn.Identity()) as recorder:
        call(dtype)
    assert other.calls, "the kernel was not called"
    assert recorder.trace.meta["failures"] == {}
    return recorder.trace


@pytest.mark.parametrize("dtype", SIXTEEN, ids=["fp16", "bf16"])
@pytest.mark.parametrize("plant", PLANTS)
def test_a_wrong_kernel_is_named(plant, dtype):
    name, call, kernel = PLANTS[plant]
    found = find_wrong_kernels(record(name, call, kernel, dtype))
    assert [(one.cause.id, one.op) for one in found] == [("kernel-off", name.replace("::", "."))]


@pytest.mark.parametrize("dtype", SIXTEEN, ids=["fp16", "bf16"])
@pytest.mark.parametrize("plant", PLANTS)
def test_its_right_twin_is_not(plant, dtype):
    name, call, _ = PLANTS[plant]
    assert find_wrong_kernels(record(name, call, in_fp64, dtype)) == []
