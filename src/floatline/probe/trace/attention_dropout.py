"""The dropout mask of a fused attention kernel, which keeps it to itself: the kernel is made to show it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

# Where kernels of different versions put the state of the random numbers: among the outputs, and among the arguments.
_SEEDS = ("philox_seed", "rng_state")
_OFFSETS = ("philox_offset", "unused")


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
