"""Bounds: how far a 16-bit result may be from FP32's on the same inputs, by family of operations."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor

from floatline.probe.trace.schemas import TracedCall, tensors_of
from floatline.probe.trace.twin_rules import EXACT, RULES, Wide

# Half the spacing of FP32's numbers at 1.
_FINE = 2.0**-24
# Functions such as exp are computed to a few of those; torch's fastest to 20.
_FUNCTION = 64 * _FINE
# A bound for each result: an error inside of the operation, before its result is rounded; None: there is none known.
Errors = Sequence["Tensor | float | None"]
Bound = Callable[["SameInputs"], Errors]


@dataclass(frozen=True, slots=True)
class SameInputs:
    """An operation with its own 16-bit inputs as FP32 numbers, and what FP32 makes of them.

    Args:
        call: The operation as it was called.
        wide: The same with FP32 arguments.
        results: What FP32 gives.
        coarse: Half the spacing at 1 of the format of the results, 2**-11 in float16 and 2**-8 in bfloat16.
    """

    call: TracedCall
    wide: Wide
    results: Sequence[Tensor | None]
    coarse: float

    @property
    def result(self) -> Tensor:
        """The first result."""
        return cast("Tensor", self.results[0])

    def of(self, change: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        """What the operation gives in FP32 of changed floating-point arguments, with `alpha` and `beta` above 0."""

        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value) if value.is_floating_point() else value.clone()
            if isinstance(value, list):
                return [changed(item) for item in cast("list[Any]", value)]
            return value

        kwargs = {name: changed(value) for name, value in self.wide.kwargs.items()}
        kwargs |= {name: abs(kwargs[name]) for name in ("alpha", "beta") if name in kwargs}
        return run_aside(self.call, Wide(self.wide.func, [*map(changed, self.wide.args)], kwargs, ()))

    def has_number(self) -> bool:
        """Whether a Python number, or a tensor that stands for one, is among the arguments: it may be rounded first."""
        return bool(self.call.numbers()) or any(a.tensor.dim() == 0 for a in self.call.tensors)


def find_bound(call: TracedCall) -> Bound | None:
    """The bound of an operation; None where none is known, and the operation is not judged."""
    if not call.schema.name.startswith("aten."):
        return bound_foreign
    if call.schema.base == "index_put" and call.named[-1][1] is True and len(call.named) > 3:
        return bound_scatter
    if call.schema.base == "_fused_rms_norm" and len(call.args) < 4:
        return None  # its eps is the format's own, another in FP32
    return BOUNDS.get(call.schema.base)


def results_of(call: TracedCall, wide: Wide) -> list[Tensor | None]:
    """What FP32 gives of the same inputs."""
    base = call.schema.base
    if base in _NORMS:
        return [_normalize(wide, base).result]
    rule = RULES.get(base)
    if rule is not None:
        return tensors_of(rule(wide))
    return run_aside(call, wide)


def run_aside(call: TracedCall, wide: Wide) -> list[Tensor | None]:
    """The results of a call with other arguments: what it gives, or else what it writes, in copies of its own."""

    def copied(name: str, value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and name in call.schema.writes else value

    names = call.schema.names
    args = [copied(name, value) for name, value in zip(names, wide.args, strict=False)]
    kwargs = {name: copied(name, value) for name, value in wide.kwargs.items()}
    given = tensors_of(wide.func(*args, **kwargs))
    named = [*zip(names, args, strict=False), *kwargs.items()]
    if any(t is not None for t in given):
        return given
    return [value for name, value in named if name in call.schema.writes and isinstance(value, Tensor)]


# Operations that give each element by itself.


def bound_exact(_same: SameInputs) -> Errors:
    """Numbers are moved or picked: nothing is rounded but by the format of the result."""
    return (0.0,)


def bound_arithmetic(same: SameInputs) -> Errors:
    """One operation of FP32, rounded once: a few roundings of FP32 of the result, and the rounding of a number.

    Numerics:
        A number in the code may be rounded to 16 bits before, which moves a product or quotient by as much.
    """
    number = 1.02 * same.coarse if same.has_number() else 0.0
    return ((4 * _FINE + number) * same.result.abs(),)


def bound_sum_of_two(same: SameInputs) -> Errors:
    """`a + alpha * b`: a few roundings of FP32 of both; a number and alpha * b may be rounded to 16 bits twice."""
    given = same.wide.named()
    alpha = abs(float(given.get("alpha", 1)))
    parts = [alpha * abs(given["other"]), abs(given["self"])]
    if same.call.schema.base == "rsub":
        parts = [abs(given["other"]), alpha * abs(given["self"])]
    rounded = same.coarse * max_of(parts) if same.has_number() or alpha != 1 else 0.0
    return (4 * _FINE * (parts[0] + parts[1]) + 2.04 * rounded,)


def max_of(parts: Sequence[Tensor | float]) -> Any:
    """The larger one, element by element."""
    own = [torch.as_tensor(part) for part in parts]
    device = max((part.device for part in own), key=lambda device: device.type != "cpu")
    return torch.maximum(own[0].to(device), own[1].to(device))


def bound_function(same: SameInputs) -> Errors:
    """A function of one number, to 64 roundings of FP32 of its result; of some, and of a quarter.

    Numerics:
        torch's rsqrt on a CPU rounds the root to float16 at the end of a row before it divides.
    """
    steps = 1.02 * same.coarse if same.call.schema.base == "rsqrt" else 0.0
    return (
        (_FUNCTION + steps) * same.result.abs() + (0.25 * _FUNCTION if same.call.schema.base in _ABSOLUTE else 0.0),
    )


def bound_gate(same: SameInputs) -> Errors:
    """x times a function that is made by a difference, as GELU: 64 roundings of FP32 of x."""
    return (_FUNCTION * (cast("Tensor", same.wide.args[0]).abs() + same.result.abs()),)


def bound_gate_backward(same: SameInputs) -> Errors:
    """A gradient times a function of y that is made by a difference: 64 roundings of FP32 of gradient * (1 + |y|).

    Numerics:
        torch's sigmoid on a CPU computes gradient * (1 - y) * y in float16, with a rounding each.
    """
    gradient, y = same.wide.args[:2]
    steps = 3.06 * same.coarse if same.call.schema.base == "sigmoid_backward" else 0.0
    return (_FUNCTION * gradient.abs() * (1 + y.abs()) + steps * same.result.abs(),)


# Sums of products.


def _bound_linear(same: SameInputs, counts: Sequence[float], *, coarse: Sequence[float] = (0.0,)) -> Errors:
    """Sums of so many products: each is rounded in FP32, and FP32's own result is as far off.

    Numerics:
        |error| <= 1.125 * (n + 8) * 2**-24 * sum |a||b|, in whatever order n products are added up in FP32.
    """
    sizes = same.of(torch.abs)
    gamma = [1.125 * (count + 8) * _FINE + steps for count, steps in zip_longest(counts, coarse, fillvalue=0.0)]
    return [None if size is None else share * size for size, share in zip(sizes, gamma, strict=True)]


def bound_product(same: SameInputs) -> Errors:
    """Products of matrices: as many products in a sum as the inner dimension says.

    Numerics:
        On CUDA the partial sums of a split reduction may be added up in 16 bits, if
        `torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction` (or `bf16`) says so, as it does by default:
        up to 32 parts of at least 64 products, each rounded, and so each partial sum of them.
    """
    first, second = _factors(same)
    inner = first.shape[-1]
    coarse = 0.0
    if second.is_cuda:
        form = "bf16" if same.coarse > 2.0**-9 else "fp16"
        allowed: Any = getattr(torch.backends.cuda.matmul, f"allow_{form}_reduced_precision_reduction", True)
        first_of = bool(cast("Any", allowed)[0] if isinstance(allowed, tuple) else allowed)
        coarse = same.coarse * min(32, inner / 64) if first_of else 0.0
    return _bound_linear(same, [inner + 2], coarse=[coarse])


def _factors(same: SameInputs) -> tuple[Tensor, Tensor]:
    args = same.wide.args
    return (args[1], args[2]) if same.call.schema.base in _ADDED else (args[0], args[1])


def bound_convolution(same: SameInputs) -> Errors:
    """A convolution: as many products in a sum as the kernel has weights for a channel.

    Numerics:
        A transposed one may round what each place of the kernel gives to 16 bits, and add these up in 16 bits.
    """
    given = same.wide.named()
    weight, transposed = given["weight"], given["transposed"]
    over, places = (weight.shape[0] // given["groups"] if transposed else weight.shape[1]), math.prod(weight.shape[2:])
    return _bound_linear(same, [over * places + 1], coarse=[_steps(same, places + 1) if transposed else 0.0])


def _steps(same: SameInputs, num: int) -> float:
    """What so many roundings to 16 bits in a row come to, on a CPU."""
    return 0.0 if same.call.tensors[0].tensor.is_cuda else 1.02 * same.coarse * num


def bound_reduction(same: SameInputs) -> Errors:
    """A sum: as many numbers as go into one. A mean may round the sum first."""
    count = same.wide.args[0].numel() / max(1, same.result.numel())
    return _bound_linear(same, [count], coarse=[same.coarse if same.call.schema.base == "mean" else 0.0])


def bound_norm_of_vector(same: SameInputs) -> Errors:
    """The root of a sum of squares, none of which is below 0: as far off as a sum, of its own size."""
    count = same.wide.args[0].numel() / max(1, same.result.numel())
    return ((2 * (count + 8)) * _FINE * same.result.abs(),)


def bound_scatter(same: SameInputs) -> Errors:
    """Sums at places that indices name, added one after the other in 16 bits, as torch does it.

    Numerics:
        |error| <= c * 2**-11 (float16; 2**-8 in bfloat16) * sum |a| where c numbers come to one place.
    """
    (size,), (count,) = same.of(torch.abs), same.of(torch.ones_like)
    # A product with alpha that is below the format's normal numbers is rounded to their spacing.
    return (None if size is None or count is None else count * (1.02 * same.coarse * size + 2.0**-24),)


def bound_running_sum(same: SameInputs) -> Errors:
    """A running sum, which torch adds up in 16 bits on some devices."""
    (size,), (count,) = same.of(torch.abs), same.of(torch.ones_like)
    return (None if size is None or count is None else 1.02 * same.coarse * count * size,)


# Softmax.


def bound_softmax(same: SameInputs) -> Errors:
    """exp(x - max) / sum: of the size of the result, as far off as x - max is large and n numbers add up in FP32.

    Numerics:
        torch's kernel for a CPU keeps exp(x - max) in 16 bits at the end of a row: one more rounding.
    """
    x, dim = same.wide.args[:2]
    below = (x.amax(dim, keepdim=True) - x).clamp(max=200.0) if x.numel() else x
    share = _steps(same, 1) + _FUNCTION + (4 * below + 2 * _size(x, dim)) * _FINE
    return (share * same.result.abs(),)


def bound_log_softmax(same: SameInputs) -> Errors:
    """x - max - log(sum): an absolute error, of the size of the largest number on the way, which is not the result.

    Numerics:
        |error| <= 2**-20 * (|x| + |max| + log n + 1) + n * 2**-23, since `x - (max + log(sum))` is as good a way,
        and on a CPU one rounding to 16 bits each of the sum, its logarithm, max + log(sum) and x - max, which torch's
        kernels make there.
    """
    x, dim = same.wide.args[:2]
    num = _size(x, dim)
    top = x.amax(dim, keepdim=True).abs() if x.numel() else x.abs()
    inside = x.amax(dim, keepdim=True) - x + top + 2 * math.log(max(num, 1)) + 1 if x.numel() else x
    fine = (x.abs() + top + math.log(max(num, 1)) + 1) * 16 * _FINE + num * 2 * _FINE
    return (fine + _steps(same, 1) * inside,)


def bound_softmax_backward(same: SameInputs) -> Errors:
    """y * (g - sum(y * g)): n products in FP32."""
    gradient, y, dim = same.wide.args[:3]
    size = y.abs() * (gradient.abs() + (gradient * y).abs().sum(dim, keepdim=True))
    return ((2 * _size(y, dim) + 64) * _FINE * size,)


def bound_log_softmax_backward(same: SameInputs) -> Errors:
    """g - exp(y) * sum(g): n numbers in FP32."""
    gradient, y, dim = same.wide.args[:3]
    size = gradient.abs() + y.exp() * gradient.abs().sum(dim, keepdim=True)
    return ((2 * _size(y, dim) + 64) * _FINE * size,)


def _size(x: Tensor, dim: int) -> int:
    return x.shape[dim] if x.dim() else 1


# Norms.


@dataclass(frozen=True, slots=True)
class _Normalized:
    result: Tensor
    x: Tensor
    mean: Tensor
    inverse: Tensor
    square: Tensor
    mean_size: Tensor
    weight: Tensor | float
    bias: Tensor | float
    count: int


def _normalize(wide: Wide, base: str) -> _Normalized:
    """A norm from its definition, in FP64."""
    given = wide.named()
    x = cast("Tensor", given["input"]).double()
    eps: Any = given.get("eps", given.get("epsilon"))
    weight, bias = given.get("weight"), given.get("bias")
    if "group_norm" in base:
        grouped = x.reshape(given["N"], given["group"], -1)
        dims, shape, over = [2], (1, x.shape[1], *([1] * (x.dim() - 2))), grouped
    else:
        dims, shape, over = [*range(x.dim() - len(given["normalized_shape"]), x.dim())], None, x
    mean = over.mean(dims, keepdim=True)
    square = over.square().mean(dims, keepdim=True)
    spread = (over - mean).square().mean(dims, keepdim=True)
    if "rms" in base:
        mean, spread = torch.zeros_like(mean), square
    inverse: Tensor = (spread + eps).rsqrt()
    normal = (over - mean) * inverse
    columns = [
        None if own is None else own.double() if shape is None else own.double().view(shape) for own in (weight, bias)
    ]
    scale, shift = (1.0 if columns[0] is None else columns[0]), (0.0 if columns[1] is None else columns[1])

    def spreads(part: Tensor) -> Tensor:
        return part.expand_as(over).reshape(x.shape)

    sizes = over.abs().mean(dims, keepdim=True)
    count = math.prod(over.shape[dim] for dim in dims)
    return _Normalized(
        normal.reshape(x.shape) * scale + shift, x, spreads(mean), spreads(inverse), spreads(square), spreads(sizes),
        scale, shift, count,
    )  # fmt: skip


def bound_norm(same: SameInputs) -> Errors:
    """(x - mean) / deviation * weight + bias in FP32, of numbers that may have a common offset.

    Numerics:
        With g = (8 * sqrt(n) + 64) * 2**-24 for sums of n numbers, which are added up in blocks: mean is off by
        g * mean |x|, the variance, which may be a difference of mean squares, by g * mean x². Both are carried on.
    """
    own = _normalize(same.wide, same.call.schema.base)
    gamma = (8 * math.sqrt(own.count) + 64) * _FINE
    offset = 16 * _FINE * (own.x.abs() + own.mean.abs()) + gamma * own.mean_size
    stretched = (own.x - own.mean).abs() * gamma * own.square * own.inverse.square()
    error = own.inverse * abs(own.weight) * (offset + stretched) + 16 * _FINE * (abs(own.bias) + own.result.abs())
    return (error, *([None] * (len(same.wide.outputs) - 1)))


# Attention.


def bound_attention(same: SameInputs) -> Errors:
    """Attention: probabilities may be rounded to 16 bits before they are multiplied with the values.

    Numerics:
        With s the error of a score, d * 2**-23 * |q||k| * scale + 2**-20 * |score|, and p its probability:
        |error| <= (4 * 2**-11 (float16; 2**-8 in bfloat16) + 2 s + (keys + 64) * 2**-23) * sum p |v|.
    """
    given = same.wide.named()
    if given.get("dropout_p"):
        return (None,)
    query, key, value = given["query"], given["key"], given["value"]
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    longest = key.norm(dim=-1).amax(-1, keepdim=True)
    repeated = query.shape[-3] // key.shape[-3]
    reach = query.norm(dim=-1) * longest.repeat_interleave(repeated, dim=-2) * abs(scale)
    bias = next((given[name] for name in ("attn_mask", "attn_bias") if given.get(name) is not None), None)
    added = 0.0
    if bias is not None and bias.dtype is not torch.bool:
        added = torch.where(bias.isfinite(), bias.abs(), 0.0).amax()
    score = (query.shape[-1] + 8) * 2 * _FINE * reach + 16 * _FINE * (reach + added)
    share = 4 * same.coarse + 2 * score + (key.shape[-2] + 64) * 2 * _FINE
    args = [value.abs() if arg is value else arg for arg in same.wide.args]
    kwargs = {name: value.abs() if arg is value else arg for name, arg in same.wide.kwargs.items()}
    size = tensors_of(RULES[same.call.schema.base](Wide(same.wide.func, args, kwargs, same.wide.outputs)))[0]
    return (None if size is None else share.unsqueeze(-1) * size, *([None] * (len(same.wide.outputs) - 1)))


# Kernels of others.

_DRAWS, _FOREIGN_TIMES = 3, 16.0


def bound_foreign(same: SameInputs) -> Errors:
    """A kernel that torch does not know, by itself in FP32: what the format's rounding of its inputs does to a row.

    Numerics:
        Inputs are moved by one rounding of their format, up or down, three times; 16 times what that moves in a row,
        along the last dimension, is allowed, and 16 roundings of the largest number of the row. An estimate, not a
        theorem: it holds a kernel to what one that rounds its inputs and some of what it computes would give.
    """
    largest: list[Tensor | None] = [None] * len(same.results)
    generator = torch.Generator().manual_seed(0)

    def moved(tensor: Tensor) -> Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
        return tensor * (1 + same.coarse * signs).to(tensor.dtype)

    for _ in range(_DRAWS):
        for i, (again, result) in enumerate(zip(same.of(moved), same.results, strict=True)):
            if again is not None and result is not None and again.is_floating_point() and again.shape == result.shape:
                apart = (again - result).abs().nan_to_num(nan=math.inf)
                known = largest[i]
                largest[i] = apart if known is None else torch.maximum(known, apart)
    errors: list[Tensor | None] = []
    for apart, result in zip(largest, same.results, strict=True):
        if apart is None or result is None or not result.numel():
            errors.append(None)
            continue
        rows = (apart, result.abs()) if not result.dim() else (_along_row(apart), _along_row(result.abs()))
        errors.append(_FOREIGN_TIMES * (rows[0] + same.coarse * rows[1]))
    return errors


def _along_row(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True).expand_as(x)


_ADDED = frozenset(("addmm", "baddbmm", "addmv", "addbmm"))
_NORMS = frozenset(("native_layer_norm", "native_group_norm", "_fused_rms_norm"))
# Their results may be small where nothing else is.
_ABSOLUTE = frozenset(("sin", "cos", "log", "log2", "log10", "erf"))
_FUNCTIONS = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sigmoid", "tanh", "erf", "sin", "cos", "atan"),
    *("rsqrt", "sqrt", "reciprocal", "silu"),
)
_NOT_MOVED = frozenset(
    (
        *("_to_copy", "copy", "max", "min", "sort", "topk", "index_put", "scatter", "masked_scatter", "_foreach_zero"),
        *("zero", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"),
    )
)
_ATTENTIONS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")

BOUNDS: dict[str, Bound] = {
    **dict.fromkeys(sorted(EXACT - _NOT_MOVED), bound_exact),
    **dict.fromkeys(("_to_copy", "copy"), bound_exact),
    **dict.fromkeys(("mul", "div"), bound_arithmetic),
    **dict.fromkeys(("add", "sub", "rsub"), bound_sum_of_two),
    **dict.fromkeys(_FUNCTIONS, bound_function),
    "gelu": bound_gate,
    **dict.fromkeys(("gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward"), bound_gate_backward),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear", *_ADDED), bound_product),
    "convolution": bound_convolution,
    **dict.fromkeys(("sum", "mean"), bound_reduction),
    "linalg_vector_norm": bound_norm_of_vector,
    **dict.fromkeys(("index_add", "scatter_add", "embedding_dense_backward"), bound_scatter),
    "cumsum": bound_running_sum,
    "_softmax": bound_softmax,
    "_log_softmax": bound_log_softmax,
    "_softmax_backward_data": bound_softmax_backward,
    "_log_softmax_backward_data": bound_log_softmax_backward,
    **dict.fromkeys(sorted(_NORMS), bound_norm),
    **{f"_scaled_dot_product_{kernel}": bound_attention for kernel in _ATTENTIONS},
}
