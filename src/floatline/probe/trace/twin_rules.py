"""Operations whose FP32 twin is not just the same operation in float32."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from floatline.probe.trace.schemas import TracedCall, has_twin

# Where kernels of different versions put the state of the random numbers: among the outputs, and among the arguments.
_SEEDS = ("philox_seed", "rng_state")
_OFFSETS = ("philox_offset", "unused")


@dataclass(frozen=True, slots=True)
class Wide:
    """A call with its arguments in float32, and what the operation itself gave."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: Sequence[Tensor | None]

    def named(self) -> dict[str, Any]:
        """All arguments by name."""
        return dict(zip((a.name for a in self.func._schema.arguments), self.args, strict=False)) | self.kwargs


Rule = Callable[[Wide], Any]

LOW = frozenset(
    getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "complex32"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
    if hasattr(torch, name)
)
# They move numbers, or pick among them, without rounding: what they make of exact numbers is exact.
EXACT = frozenset(
    (
        *("clone", "cat", "stack", "index", "index_select", "gather", "embedding", "masked_select", "copy", "_to_copy"),
        *("zero", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "relu", "neg", "abs", "where"),
        *("constant_pad_nd", "repeat", "flip", "roll", "tril", "triu", "slice_scatter", "select_scatter", "scatter"),
        *("index_put", "masked_scatter", "maximum", "minimum", "amax", "amin", "max", "min", "sort", "topk", "sign"),
        *("select_backward", "slice_backward", "diagonal_backward", "threshold_backward", "unfold_backward"),
        *("max_pool2d_with_indices", "replication_pad2d", "reflection_pad2d", "as_strided", "_foreach_zero"),
    )
)
# They choose by the size of numbers: their integers and truth values may be others in FP32.
CHOICES = frozenset(
    (
        *("argmax", "argmin", "argsort", "sort", "topk", "max", "min", "kthvalue", "median", "mode", "nonzero"),
        *("gt", "ge", "lt", "le", "eq", "ne", "bucketize", "searchsorted", "_to_copy", "isin", "histc", "signbit"),
    )
)
# Integers that choose numbers and are none themselves.
_INDICES = ("index", "indices")
_EXACT_IN_ALL = 16  # every integer up to here is a number of every format, float8 included
# What they write belongs to the step: the loss scale, and whether the step is skipped, are the same in the twin.
REBASED = {
    "_amp_update_scale": ("self", "growth_tracker"),
    "_amp_foreach_non_finite_check_and_unscale": ("found_inf",),
}
# They hand private notes in a form of their own from forward to backward.
OPAQUE = frozenset(
    (
        *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward"),
        *("miopen_rnn", "miopen_rnn_backward", "_cudnn_rnn_flatten_weight"),
    )
)


def dtype_of_twin(dtype: torch.dtype) -> torch.dtype:
    """The dtype that stands for another in the twin."""
    if dtype not in LOW:
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32


def widened(call: TracedCall, widen: Callable[[str, Tensor], Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with each tensor, by the name of its argument, replaced, and dtypes in float32."""

    def replace(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return widen(name, value)
        if isinstance(value, (list, tuple)):
            return [replace(name, item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return dtype_of_twin(value) if isinstance(value, torch.dtype) else value

    args = [
        widen(name, value) if isinstance(value, Tensor) else replace(name, value)
        for name, value in zip(call.schema.names, call.args, strict=False)
    ]
    return args, {name: replace(name, value) for name, value in call.kwargs.items()}


def does_not_round(call: TracedCall, results: set[torch.dtype]) -> bool:
    """Whether an operation makes exact numbers of exact ones, in the dtypes of its results."""
    dtypes = {t.dtype for t in call.floats} | results
    if not dtypes & LOW:
        return True
    if call.schema.base not in EXACT or (results & LOW and len(dtypes) > 1):
        return False
    chosen = all(has_twin(a.tensor) or a.tensor.dtype is torch.bool or a.name in _INDICES for a in call.tensors)
    return chosen and all(n == int(n) and abs(n) <= _EXACT_IN_ALL for n in call.numbers() if math.isfinite(n))


@contextmanager
def full_float32() -> Generator[None]:
    """Products and convolutions on NVIDIA GPUs without TF32."""
    read = (torch._C._get_cublas_allow_tf32, torch._C._get_cudnn_allow_tf32)
    write = (torch._C._set_cublas_allow_tf32, torch._C._set_cudnn_allow_tf32)
    try:
        before = [get() for get in read]
    except RuntimeError:  # set through torch's newer interface, which the older one cannot read
        yield
        return
    try:
        for put in write:
            put(False)
        yield
    finally:
        for put, value in zip(write, before, strict=True):
            put(value)


def _native_dropout(wide: Wide) -> Any:
    x, p = wide.args[:2]
    mask = wide.outputs[1]
    if mask is None or wide.args[2:] == [False]:
        return x.clone(), mask
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _softmax(wide: Wide) -> Any:
    return wide.func(*wide.args[:2], False)  # "half to float" is for half inputs only


def _attention(wide: Wide) -> Any:
    given = wide.named()
    query, key, value = given["query"], given["key"], given["value"]
    weights, is_empty, _ = _attention_weights(given, query, key)
    factors = _dropout_factors(wide, given)
    result = (weights if factors is None else weights * factors) @ _repeat(value, query)
    result.masked_fill_(is_empty, 0.0)
    # The logarithm of sums and the random state are used by the kernel's own backward only.
    return (result, *([None] * (len(wide.outputs) - 1)))


def _attention_backward(wide: Wide) -> Any:
    given = wide.named()
    gradient = given["grad_out"] if "grad_out" in given else given["grad_out_"]
    query, key, value = given["query"], given["key"], given["value"]
    weights, is_empty, scale = _attention_weights(given, query, key)
    weights.masked_fill_(is_empty, 0.0)
    factors = _dropout_factors(wide, given)
    used = weights if factors is None else weights * factors
    by_weight = gradient @ _repeat(value, query).mT
    by_weight = by_weight if factors is None else by_weight * factors
    by_score = weights * (by_weight - (by_weight * weights).sum(-1, keepdim=True))
    gradients = [
        by_score @ _repeat(key, query) * scale,
        _fold(by_score.mT @ query * scale, key),
        _fold(used.mT @ gradient, value),
    ]
    if len(wide.outputs) > 3 and wide.outputs[3] is not None:
        gradients.append(by_score.sum_to_size(wide.outputs[3].shape))
    return (*gradients, *([None] * (len(wide.outputs) - len(gradients))))


def _dropout_factors(wide: Wide, given: dict[str, Any]) -> Tensor | None:
    """What dropout multiplies the attention weights by: 0, or one over the share that it keeps; None without it."""
    p = given.get("dropout_p")
    if not p:
        return None
    dtype = next(output.dtype for output in wide.outputs if output is not None)
    return find_mask(wide.func, given, wide.outputs, dtype) / (1 - p)


def _attention_weights(given: dict[str, Any], query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
    """Weights; where a query has no key, which leaves NaN in its weights and is 0 in torch's kernels; and the scale.

    Weights are the largest tensors of most models: each further copy of them takes as long as their product.
    """
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = (query * scale) @ _repeat(key, query).mT
    bias = next((given[name] for name in ("attn_mask", "attn_bias") if given.get(name) is not None), None)
    if given.get("is_causal"):
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(hidden, -math.inf)
    if bias is not None:
        scores = scores.masked_fill_(~bias, -math.inf) if bias.dtype is torch.bool else scores + bias
    return scores.softmax(-1), scores.amax(-1, keepdim=True) == -math.inf, scale


def _repeat(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values for every head of the query."""
    return x if x.shape[-3] == query.shape[-3] else x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3)


def _fold(gradient: Tensor, x: Tensor) -> Tensor:
    """What `_repeat` did, backward."""
    if gradient.shape[-3] == x.shape[-3]:
        return gradient
    return torch.unflatten(gradient, -3, (x.shape[-3], -1)).sum(-3)


def _cudnn_batch_norm_backward(wide: Wide) -> Any:
    x, gradient, weight, running_mean, running_var, mean, inverse, eps = wide.args[:8]
    return torch.ops.aten.native_batch_norm_backward.default(
        gradient, x, weight, running_mean, running_var, mean, inverse, True, eps, [True, True, True]
    )


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
RULES: dict[str, Rule] = {
    "native_dropout": _native_dropout,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "cudnn_batch_norm_backward": _cudnn_batch_norm_backward,
    **{f"_scaled_dot_product_{kernel}": _attention for kernel in _KERNELS},
    **{f"_scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _KERNELS},
}


def find_mask(func: Any, given: dict[str, Any], outputs: Any, dtype: torch.dtype) -> Tensor:
    """Which attention weights a kernel kept: a bool for each query and key of each head.

    The kernel runs again with the random state it had, on queries and keys of 0, which make all weights alike, and
    on values that are one column of the identity each: what comes out is the mask, so many keys at a time as a
    value has numbers. The state of the generator is put back. Waits for the device.

    Numerics:
        A kept weight gives 1 / (keys * (1 - p)), far above 0 in any 16-bit format; a dropped one gives exactly 0.
        Checked by tests/probe/trace/test_attention_dropout.py, on a GPU.

    Args:
        func: The forward or backward operation.
        given: Its arguments by name.
        outputs: What it gave; a forward operation has its random state there.
        dtype: The format that it ran in: a kernel for another may draw in another order.

    Raises:
        RuntimeError: The operation has no random state, or ran on no GPU.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    name = func._schema.name.removeprefix("aten::")
    forward = getattr(torch.ops.aten, name.removesuffix("_backward")).default
    if name.endswith("_backward"):
        known = given
    else:
        known = dict(zip((result.name for result in func._schema.returns), outputs, strict=False))
    seed, offset = _read_state(known)
    if not query.is_cuda:
        raise RuntimeError("only kernels on a GPU are asked for their mask")
    options = {"attn_bias": None, "compute_log_sumexp": False, "dropout_p": given["dropout_p"]}
    taken = {argument.name for argument in forward._schema.arguments}
    options = {option: what for option, what in options.items() if option in taken}
    generator = cast("Any", torch.cuda.default_generators)[query.device.index]
    before = generator.get_state()
    nothing = [torch.zeros_like(tensor, dtype=dtype) for tensor in (query, key)]
    kept = torch.empty((*query.shape[:-1], key.shape[-2]), dtype=torch.bool, device=query.device)
    try:
        for start in range(0, key.shape[-2], value.shape[-1]):
            width = min(value.shape[-1], key.shape[-2] - start)
            shown = torch.zeros_like(value, dtype=dtype)
            places = torch.arange(width, device=query.device)
            shown[..., start + places, places] = 1.0
            generator.manual_seed(seed)
            generator.set_offset(offset)
            kept[..., start : start + width] = forward(*nothing, shown, **options)[0][..., :width] > 0
    finally:
        generator.set_state(before)
    return kept


def _read_state(known: dict[str, Any]) -> tuple[int, int]:
    """Seed and offset: two numbers, or two tensors of one each."""
    seed = next((known[name] for name in _SEEDS if isinstance(known.get(name), Tensor)), None)
    offset = next((known[name] for name in _OFFSETS if isinstance(known.get(name), Tensor)), None)
    numbers: list[int] = [] if seed is None else seed.flatten().tolist()
    if len(numbers) == 1 and offset is not None:
        numbers += offset.flatten().tolist()
    if len(numbers) < 2:
        raise RuntimeError("the kernel does not say which random numbers it drew")
    return int(numbers[0]), int(numbers[1])
