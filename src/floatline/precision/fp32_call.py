"""One call of a module or function in FP32: inputs and weights widened, autocast off; products in TF32 where asked."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from floatline.precision.dtypes import NARROW
from floatline.precision.nested import find_tensors, map_tensors


def call_in_fp32(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    module: nn.Module | None,
    keep: bool,
    default: torch.dtype | None = None,
    keep_scalars: bool = False,
) -> Any:
    """Call a function in FP32, and give its outputs the dtype that the next consumer expects.

    Args:
        function: What is called.
        args: Its arguments; 16-bit tensors in them are widened.
        kwargs: Its named arguments.
        module: Its weights are widened for the call; None where it has none.
        keep: Whether outputs stay FP32. Under autocast they do in any case: what comes next widens and narrows.
        default: What outputs become where no input tells.
        keep_scalars: Whether outputs without dimensions stay FP32: they do not widen what they are combined with.
    """
    inputs = [tensor for tensor in find_tensors(args, kwargs) if tensor.is_floating_point()]
    devices = {tensor.device.type for tensor in (*inputs, *(module.parameters() if module is not None else ()))}
    busy = [device for device in devices or {"cpu", "cuda"} if is_autocast_on(device)]
    with contextlib.ExitStack() as stack:
        for device in busy:
            stack.enter_context(torch.autocast(device, enabled=False))
        if module is not None:
            stack.enter_context(_widened(module))
        result = function(*map_tensors(widen, args), **map_tensors(widen, kwargs))
    back = next((tensor.dtype for tensor in inputs if tensor.dtype in NARROW), None if inputs else default)
    if keep or busy or back is None:
        return result

    def narrow(x: Tensor) -> Tensor:
        return x.to(back) if x.dtype == torch.float32 and (x.dim() or not keep_scalars) else x

    return map_tensors(narrow, result)


def run_in_fp32(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    keep: bool = False,
    owner: object = None,
) -> Any:
    """Call a function in FP32; one that is given a module first, as methods are, with that module's weights."""
    first = owner if owner is not None else next(iter(args), None)
    module = first if isinstance(first, nn.Module) else None
    return call_in_fp32(function, args, kwargs, module=module, keep=keep, keep_scalars=True)


def widen(tensor: Tensor) -> Tensor:
    """A 16-bit tensor in FP32; any other as it is."""
    return tensor.float() if tensor.dtype in NARROW else tensor


def is_autocast_on(device: str) -> bool:
    """Whether autocast is active for this kind of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@contextlib.contextmanager
def _widened(module: nn.Module) -> Generator[None]:
    """Every 16-bit parameter and buffer of a module and its children as an FP32 copy, until the end."""
    copies: dict[Tensor, tuple[Tensor, int]] = {}  # tied weights stay tied
    places = list(_narrow_places(module))
    # Recurrent layers keep a second list of their weights.
    layers: list[tuple[Any, Any]] = []
    try:
        for table, name, tensor, _ in places:
            if tensor not in copies:
                wide = tensor.float()
                copies[tensor] = wide, _version(wide)
            table[name] = copies[tensor][0]
        for layer in module.modules() if places else ():
            if isinstance(layer, nn.RNNBase):
                layers.append((layer, layer._flat_weights))
                layer._flat_weights = [getattr(layer, str(name), None) for name in layer._flat_weights_names]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        yield
    finally:
        for layer, weights in layers:
            layer._flat_weights = weights
        for table, name, tensor, moves in places:
            wide, version = copies.get(tensor, (None, 0))
            if wide is None or table.get(name) is not wide:  # not reached, or the module has put another one there
                continue
            table[name] = tensor
            if moves or _version(wide) != version:
                with torch.no_grad():
                    tensor.copy_(wide)


def _version(tensor: Tensor) -> int:
    """Grows when a tensor is written to; inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _narrow_places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor, bool]]:
    """Table, name, tensor, and whether it may be written to unseen: running statistics do not count as written."""
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.dtype in NARROW:
                    yield table, name, tensor, isinstance(child, _NormBase) and table is child._buffers


def allow_tf32() -> Callable[[], None]:
    """Let matrix products of FP32 tensors use TF32 in this process, where the GPU has it; gives what undoes it.

    Numerics:
        TF32 has FP32's 8 exponent bits and FP16's 10 mantissa bits, and sums in FP32: nothing overflows that FP32
        holds, and a product is off by up to 2^-10, as in FP16. It is for modules that FP16's range harms, and not for
        those that its rounding does. The setting is the process's own: under a 16-bit plan, FP32 products are those
        of the FP32 modules. On a CPU nothing changes. Checked by tests/precision/test_tf32.py.
    """
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        torch.set_float32_matmul_precision("high")
    return lambda: torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def tf32_products() -> Generator[None]:
    """`allow_tf32` for a while."""
    undo = allow_tf32()
    try:
        yield
    finally:
        undo()
