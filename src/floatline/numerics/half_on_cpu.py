"""HalfOnCPU: 16-bit matrix products, convolutions and attention on any CPU, fast and as on a GPU."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


def scatter_add_atomically(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The result of aten's scatter_add or index_add, or of their in-place forms, as CUDA computes it.

    torch's CPU kernels add in float32 and round once. CUDA's add each number to memory by an atomic operation in the
    tensor's own format: the sum of 5,000 ones is 2,048 in float16, and 256 in bfloat16.

    Numerics:
        Every addition is rounded to the format, in the order of the source. On a GPU the order varies.
        Checked by tests/numerics/test_atomic_sums.py.

    Args:
        name: 'scatter_add' or 'index_add', with '_' where it writes in place.
        args: Target, dimension, index and source, by position.
        kwargs: `alpha` of index_add.
    """
    target, dim, index, source = args[:4]
    result = target if name.endswith("_") else target.clone()
    if target.dim() == 0 or index.numel() == 0 or source.numel() == 0:
        return getattr(result, f"{name.rstrip('_')}_")(*args[1:], **kwargs)
    if name.startswith("index_add"):
        alpha = kwargs.get("alpha", 1)
        source = source if alpha == 1 else source * alpha
        rows = result.movedim(dim, 0)
        wanted = source.movedim(dim, 0).reshape(len(index), -1)
        added = _add_rows(rows.reshape(len(rows), -1), index, wanted)
        rows.copy_(added.view(rows.shape))
        return result
    # What lies beyond the index in the source is not read.
    source = source[tuple(slice(size) for size in index.shape)]
    if dim % target.dim() == 0 and target.dim() > 1 and all(stride == 0 for stride in index.stride()[1:]):
        # One index for each row, as graph libraries expand it.
        part = result[(slice(None), *(slice(size) for size in index.shape[1:]))]
        first = index[(slice(None), *[0] * (index.dim() - 1))]
        added = _add_rows(part.reshape(len(part), -1), first, source.reshape(len(first), -1))
        part.copy_(added.view(part.shape))
        return result
    places = torch.arange(result.numel(), device=result.device).view(result.shape)
    places = places[
        tuple(slice(size) if d != dim % target.dim() else slice(None) for d, size in enumerate(index.shape))
    ]
    places = places.gather(dim, index)
    added = _add_rows(result.reshape(-1, 1), places.reshape(-1), source.reshape(-1, 1))
    result.copy_(added.view(result.shape))
    return result


def _add_rows(target: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """Rows of a new tensor: those of the target, and to each its rows of the source, one after the other."""
    result = target.clone()
    touched, place, counts = cast(
        "tuple[Tensor, Tensor, Tensor]", index.unique(return_inverse=True, return_counts=True)
    )
    # Rows that get the most come first, so that in each round the rows that get one more are the first ones.
    order = counts.argsort(descending=True, stable=True)
    rank_of = torch.empty_like(order)
    rank_of[order] = torch.arange(len(order), device=order.device)
    rank = rank_of[place]
    by_row = rank.argsort(stable=True)
    starts = counts[order].cumsum(0) - counts[order]
    turn = torch.empty_like(rank)
    turn[by_row] = torch.arange(len(rank), device=rank.device) - starts[rank[by_row]]
    by_turn = (turn * len(order) + rank).argsort()
    sums = result[touched[order]]
    sizes = cast("list[int]", torch.bincount(turn).tolist())
    turns = cast("tuple[Tensor, ...]", source[by_turn].split(sizes))
    for rows, size in zip(turns, sizes, strict=True):
        sums[:size].add_(rows)
    result[touched[order]] = sums
    return result


_SIXTEEN_BITS = (torch.float16, torch.bfloat16)

# What a GPU does in one kernel: float32 inside, one rounding at the end.
_ROUNDED_ONCE = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addr", "_grouped_mm"),
        *("convolution", "_convolution", "convolution_backward", "gelu"),
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)
# Kernels that call those above and round in between, on a GPU as well: run with the mode on, so that
# every call inside is computed as above and every rounding in between stays.
_ROUNDED_BETWEEN = frozenset(
    f"aten::{name}"
    for name in (
        *("addbmm", "_trilinear", "_euclidean_dist"),
        *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    )
)
# On a GPU these add in memory, and round after every addition.
_ADDED_IN_MEMORY = frozenset(("aten::scatter_add", "aten::index_add"))
_OVERLOADS = ("", "out", "deprecated")
# Where the kernel of an operation may be registered, the most specific first.
_KERNEL_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


class HalfOnCPU(TorchDispatchMode):
    """Computes 16-bit products, convolutions and attention on the CPU in float32 and rounds the result.

    Most CPUs have no 16-bit matrix product, and torch then takes a reference kernel, some hundred times
    slower than float32. A GPU's tensor core multiplies exactly, adds in float32 and rounds once. So does
    this mode, so that FP16 and BF16 numerics can be debugged on a laptop::

        with HalfOnCPU() as mode:
            loss = model.half()(x.half()).float().mean()
            loss.backward()
        print(mode.computed)  # Counter({'aten.mm': 9, 'aten.addmm': 3, ...})

    Backward passes, autocast, gradient checkpointing, inference mode, `out=` and in-place forms are
    covered. Operations whose floating-point arguments are not all float16, or all bfloat16, dense CPU
    tensors run as without the mode; so does everything that is not a product, a convolution, attention
    or (slow in float16 too) gelu. scatter_add and index_add are rounded after every addition, as a GPU's atomic
    additions are: torch's CPU kernels would add in float32.

    The mode holds for the thread that entered it. Backward of CPU tensors runs on that thread, and is
    covered when it is called inside the `with`. DataLoader workers and threads of your own are outside.

    Numerics:
        The product of two float16 numbers is exact in float32 (of two bfloat16 numbers while it stays in
        float32's range), so a sum of K <= 100,000 products, added in any order, has
        |result - exact| <= spacing(result) / 2 + 1.01 K 2**-24 sum(|a| |b|), while torch's float32 products
        are exact ones (its default). The second term is the price of adding in float32, on a tensor core too.
        In float16 a float32 sum of 65,520 or more becomes inf, and one that passes 65,504 and comes back
        stays finite. NaN and inf propagate; subnormal results are kept.
        Attention keeps its scores and weights in float32. Without the mode, float16 convolution may
        add in float16 (seen on ARM with oneDNN), so there the mode is more exact than the kernel it replaces.
        Checked by tests/numerics/test_half_on_cpu.py.

    Attributes:
        computed: How often each operation was computed in float32.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.computed: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute one operation; torch calls this."""
        kwargs = kwargs or {}
        if types and any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # shapes only: nothing to compute
        if types and any(unwraps_itself(kind) for kind in types):
            # A tensor subclass unwraps itself first; the mode then sees the plain tensors inside.
            return NotImplemented
        way = _way(func)
        if way == "in parts":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if way == "as it is" or not _fits(func, args, kwargs):
            return func(*args, **kwargs)
        if way == "step by step":
            with self:
                return _run_lstm_layer(*args)
        if way == "one by one":
            return scatter_add_atomically(func._schema.name.removeprefix("aten::"), args, kwargs)
        if way == "rounded between":
            with self:
                return func._op_dk(_kernel_key(func), *args, **kwargs)
        self.computed[str(func.overloadpacket)] += 1
        return _compute_in_float32(func, args, kwargs)


def unwraps_itself(kind: Any) -> bool:
    """Whether a kind of tensor handles operations by itself, and is not the values that it shows."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # pyright: ignore[reportUnknownMemberType]


@cache
def _way(
    func: OpOverload[..., Any],
) -> Literal["rounded once", "rounded between", "one by one", "step by step", "in parts", "as it is"]:
    schema = func._schema
    name = schema.name.removesuffix("_")
    if name in _ROUNDED_ONCE and schema.overload_name in _OVERLOADS:
        # Nobody calls these with several `out` tensors; if so, they run as they are.
        return "rounded once" if len(_written(func)) <= 1 else "as it is"
    if name in _ROUNDED_BETWEEN:
        return "rounded between"
    if name in _ADDED_IN_MEMORY and schema.overload_name == "":
        return "one by one"
    if name == "aten::mkldnn_rnn_layer":
        return "step by step"
    # In inference mode a composite operation, such as linear, arrives whole.
    if _has_kernel(func, "CompositeImplicitAutograd") and not _has_kernel(func, "CPU"):
        return "in parts"
    return "as it is"


def _has_kernel(func: OpOverload[..., Any], key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@cache
def _kernel_key(func: OpOverload[..., Any]) -> torch._C.DispatchKey:
    # A key without a kernel would crash the interpreter, so the name is looked up, not assumed.
    key = next(key for key in _KERNEL_KEYS if _has_kernel(func, key))
    return getattr(torch._C.DispatchKey, key)


@cache
def _written(func: OpOverload[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that the operation writes to."""
    return tuple(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _fits(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all floating-point arguments are dense CPU tensors of one 16-bit dtype."""
    low = args[0].dtype
    if low not in _SIXTEEN_BITS:
        return False
    if "rnn_layer" in func._schema.name and torch.is_grad_enabled():
        return False  # its backward needs what only oneDNN's forward leaves behind
    # Attention takes a float32 mask and gives a float32 logarithm of sums beside 16-bit tensors.
    fitting = (low, torch.float32) if "attention" in func._schema.name else (low,)
    return all(
        value.device.type == "cpu"
        and value.layout is torch.strided
        and (value.dtype in fitting or not value.dtype.is_floating_point)
        for value in (*args, *kwargs.values())
        if isinstance(value, Tensor)
    )


def _run_lstm_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, None]:
    """What oneDNN does in one kernel: one layer, one direction, no gradients."""
    reverse, has_biases = rest[0], rest[5]
    biases = (b_ih, b_hh) if has_biases else ()
    outputs: list[Tensor] = []
    for step in reversed(x.unbind(0)) if reverse else x.unbind(0):
        h, c = torch.lstm_cell(step, (h, c), w_ih, w_hh, *biases)
        outputs.append(h)
    return torch.stack(outputs[::-1] if reverse else outputs), h, c, None


def _compute_in_float32(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    low = args[0].dtype
    wide: dict[int, Tensor] = {}  # by id, so that an argument given twice stays one tensor

    def widen(value: Any) -> Any:
        if value is low:
            return torch.float32  # the format of the result, where it is asked for
        if not isinstance(value, Tensor) or value.dtype != low:
            return value
        if id(value) not in wide:
            wide[id(value)] = value.float()
        return wide[id(value)]

    result = func(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})
    if _written(func):
        target: Tensor = kwargs.get("out", args[0])
        source = wide[id(target)]
        if target.shape != source.shape:
            target.resize_(source.shape)
        return target.copy_(source)
    if func._schema.name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        output, log_sum = result
        return output.to(low), log_sum
    if isinstance(result, Tensor):
        return result.to(low)
    gradients: tuple[Tensor | None, ...] = result
    return tuple(None if gradient is None else gradient.to(low) for gradient in gradients)
