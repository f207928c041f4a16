"""torch's own kernels for a CPU are within the bounds, of random and of adversarial inputs."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.marks import judges_kernels
from tests.slow import mostly_slow
from torch.utils._python_dispatch import TorchDispatchMode

from floatline.probe.trace.kernel_checks import KernelChecks
from floatline.probe.trace.schemas import TracedCall, tensors_of
from floatline.probe.watch.patches import Aside

pytestmark = judges_kernels


class JudgeAll(TorchDispatchMode):
    """Judges every operation, not only the first of its kind."""

    def __init__(self):
        super().__init__()
        self.wrong, self.judged, self.failures, self.nearest = [], set(), {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = TracedCall(func, args, kwargs or {})
        if call.schema.view or call.schema.empty or call.schema.silent:
            return call.run()
        checks = KernelChecks()
        before = checks.begin(call)
        result = call.run()
        with Aside():
            checks.finish(before, call, 0, [] if call.schema.writes else tensors_of(result))
        self.wrong += [(call.schema.name, found) for found in checks.found]
        self.failures |= dict(checks.failures)
        self.nearest |= {name: max(own, self.nearest.get(name, 0.0)) for name, own in checks.nearest.items()}
        self.judged |= {call.schema.base} if checks._seen else set()
        return result


class Numbers:
    """Tensors of one kind of numbers."""

    def __init__(self, kind, dtype, seed=0, device="cpu"):
        self.kind, self.dtype, self.device, self.generator = kind, dtype, device, torch.Generator().manual_seed(seed)

    def __call__(self, *shape):
        return self.make(torch.randn(shape, generator=self.generator)).to(self.device, self.dtype)

    def indices(self, high, num):
        return torch.randint(0, high, (num,), generator=self.generator).to(self.device)

    def mask(self, *shape):
        return (torch.rand(shape, generator=self.generator) > 0.3).to(self.device)

    def leaf(self, *shape):
        return self(*shape).requires_grad_()

    def make(self, x):
        flat = x.view(-1)
        match self.kind:
            case "one number":
                return torch.full_like(x, 0.1)
            case "an offset":
                return 0.1 * x + 30
            case "subnormal":
                return 1e-7 * x
            case "small":
                return 1e-6 * x
            case "large":
                return 100 * x
            case "overflowing":
                return 3000 * x
            case "cancelling":
                flat[1::2] = -flat[::2][: flat[1::2].numel()]
                return 10 * x
            case "inf":
                flat[: max(1, x.numel() // 50)] = math.inf
                return x
            case "of all sizes":
                return x * torch.exp(4 * torch.randn(x.shape, generator=self.generator))
            case "zeros":
                return 0 * x
            case "ties":
                return (4 * x).round() / 8
        return x


KINDS = (
    *("normal", "one number", "an offset", "subnormal", "small", "large", "overflowing", "cancelling", "inf"),
    *("of all sizes", "zeros", "ties"),
)
FUNCTIONS = (
    *(torch.exp, torch.log, torch.sigmoid, torch.tanh, torch.sin, torch.cos, torch.erf, torch.rsqrt, torch.sqrt),
    *(torch.reciprocal, torch.log1p, torch.expm1, torch.relu, torch.abs, F.silu, F.gelu),
    *(lambda x: x.softmax(-1), lambda x: x.softmax(0), lambda x: x.log_softmax(-1), lambda x: x.log_softmax(0)),
    *(lambda x: x + 0.1, lambda x: x * 0.3, lambda x: x / 7.7, lambda x: 1.1 - x, lambda x: x.clamp(-1, 1)),
    *(lambda x: x.sum(), lambda x: x.sum(0), lambda x: x.mean(1), lambda x: x.mean(), lambda x: x.cumsum(0)),
    *(lambda x: x.norm(), lambda x: x.norm(dim=1), lambda x: x.t().contiguous(), lambda x: torch.cat([x, x])),
    *(lambda x: x[::2].clone(), lambda x: x.amax(1), lambda x: F.gelu(x, approximate="tanh")),
    *(lambda x: F.layer_norm(x, x.shape[1:]), lambda x: F.rms_norm(x, x.shape[1:], eps=1e-5)),
    lambda x: F.layer_norm(x, x.shape[1:], torch.full_like(x[0], 0.7), torch.full_like(x[0], 0.3)),
    lambda x: F.group_norm(x.reshape(len(x), -1, 1), 1),
    lambda x: x.sort(1).values,
)
SHAPES = ((33, 65), (32, 2), (5, 17), (3, 1), (2, 700))


def elementwise(numbers):
    for shape in SHAPES:
        for function in FUNCTIONS:
            result = function(numbers.leaf(*shape))
            result.backward(numbers(*result.shape))


def pairs(numbers):
    x, y = numbers.leaf(33, 65), numbers.leaf(33, 65)
    half = torch.tensor(0.3)
    rows = (x + y, x - y, x * y, x / y, torch.add(x, y, alpha=0.37), torch.maximum(x, y), torch.where(x > y, x, y))
    for result in (
        *rows,
        x * half,
        x + y[0],
        x * y[:, :1],
        x - x.mean(1, keepdim=True),
        x[:, ::2] + y[:, 1::2].sum(1)[:, None],
    ):
        result.backward(numbers(*result.shape), retain_graph=True)


def products(numbers):
    for m, k, n in ((7, 5, 3), (33, 65, 17), (1, 513, 9), (64, 2048, 8), (0, 4, 3), (3, 0, 2)):
        x, w = numbers.leaf(m, k), numbers.leaf(n, k)
        for result in (F.linear(x, w, numbers(n)), x @ w.t()):
            result.backward(numbers(*result.shape))
    a, b = numbers.leaf(4, 9, 300), numbers.leaf(4, 300, 7)
    (a @ b).backward(numbers(4, 9, 7))
    torch.mv(numbers(30, 300), numbers(300)), torch.dot(numbers(300), numbers(300))
    torch.baddbmm(numbers(4, 9, 7), numbers(4, 9, 30), numbers(4, 30, 7), beta=0.3, alpha=0.7)
    torch.addmm(numbers(9, 7), numbers(9, 30), numbers(30, 7), beta=0.3, alpha=-0.7)


def convolutions(numbers):
    for options in ({}, {"padding": 1, "stride": 2}, {"groups": 4}):
        x, w = numbers.leaf(3, 8, 15, 15), numbers.leaf(12, 8 // options.get("groups", 1), 3, 3)
        result = F.conv2d(x, w, numbers(12), **options)
        result.backward(numbers(*result.shape))
    x, w = numbers.leaf(3, 8, 40), numbers.leaf(12, 8, 3)
    result = F.conv1d(x, w, numbers(12))
    result.backward(numbers(*result.shape))
    x, w = numbers.leaf(3, 8, 9, 9), numbers.leaf(8, 6, 3, 3)
    result = F.conv_transpose2d(x, w, stride=2)
    result.backward(numbers(*result.shape))
    x = numbers.leaf(2, 64, 20, 20).to(memory_format=torch.channels_last)
    result = F.conv2d(x, numbers.leaf(64, 64, 3, 3), padding=1)
    result.backward(numbers(*result.shape))


def scatters(numbers):
    index = numbers.indices(5, 400)
    numbers(5, 7).index_add_(0, index, numbers(400, 7))
    numbers(5, 7).index_add(0, index, numbers(400, 7), alpha=0.3)
    numbers(5).scatter_add_(0, index, numbers(400))
    numbers(5, 7).index_put_((index,), numbers(400, 7), accumulate=True)
    F.embedding(index, numbers.leaf(5, 7)).backward(numbers(400, 7))


def attention(numbers):
    for queries, keys, width, heads, fewer in ((17, 17, 16, 2, 2), (70, 70, 64, 2, 2), (5, 600, 8, 2, 2)):
        mask = numbers.mask(queries, keys)
        causal = {"is_causal": True} if queries == keys else {}
        for options in ({}, causal, {"attn_mask": mask}, {"attn_mask": numbers(queries, keys)}, {"scale": 0.9}):
            q, k, v = numbers.leaf(2, heads, queries, width), *(numbers.leaf(2, fewer, keys, width) for _ in "kv")
            result = F.scaled_dot_product_attention(q, k, v, **options)
            result.backward(numbers(*result.shape))


PROGRAMS = {p.__name__: p for p in (elementwise, pairs, products, convolutions, scatters, attention)}
JUDGED = {
    "elementwise": {"exp", "_softmax", "_log_softmax", "native_layer_norm", "sum", "mean"},
    "pairs": {"add", "sub", "mul", "div", "where", "maximum"},
    "products": {"mm", "addmm", "bmm", "mv", "dot", "baddbmm"},
    "convolutions": {"convolution"},
    "scatters": {"index_add", "scatter_add", "index_put", "embedding_dense_backward"},
    "attention": {"_scaled_dot_product_flash_attention_for_cpu"},
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", mostly_slow(KINDS, every=12))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_torchs_own_kernels_are_within_their_bounds(program, kind, dtype):
    judge = JudgeAll()
    numbers = Numbers(kind, dtype)
    with judge:
        PROGRAMS[program](numbers)
    assert judge.wrong == []
    assert judge.failures == {}
    assert judge.judged >= JUDGED[program]
