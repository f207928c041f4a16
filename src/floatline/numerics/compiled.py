"""Loops that numba compiles, over the numbers of CPU tensors: which there are, and how they are run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

# From so many elements on loops are compiled, which takes one to three seconds for a format.
COMPILED_FROM = 1 << 18
_PLAIN = (Tensor, nn.Parameter)
_SHARE = 1 << 17  # elements below which a second thread costs more than it brings


@functools.cache
def split_loops() -> ModuleType | None:
    """`split_numba`; None where numba is not installed, does not load, must not compile, or would need a library."""
    try:
        import numba
    except ImportError:  # also raised by a numba that is too old for the NumPy beside it
        return None
    if cast("Any", numba).config.DISABLE_JIT:  # the plain loop would take minutes
        return None
    from floatline.numerics import split_numba

    # Of the code, not the processor: NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may keep instructions from it.
    return cast("ModuleType", split_numba) if cast("Any", split_numba).converts_half() else None


def is_worth_compiling(*tensors: Tensor) -> bool:
    """Whether these are enough numbers on a CPU, lie one after the other, and are really there."""
    return all(
        type(tensor) in _PLAIN and tensor.is_cpu and tensor.numel() >= COMPILED_FROM and tensor.is_contiguous()
        for tensor in tensors
    )


def run_loop(loop: Callable[..., object], jobs: Sequence[tuple[Sequence[Tensor], Sequence[Any]]]) -> None:
    """Run a loop over flat tensors of one length each, by as many threads as torch may use.

    Args:
        loop: Takes arrays, of bits where a tensor is of 16 bits, and then numbers.
        jobs: The tensors of each, and the numbers. torch does not count what the loop writes.
    """
    threads = torch.get_num_threads()
    pieces: list[tuple[Any, ...]] = []
    for tensors, numbers in jobs:
        arrays = [_as_array(tensor) for tensor in tensors]
        length = len(arrays[0])
        parts = min(threads, length // _SHARE)
        if parts < 2:
            pieces.append((*arrays, *numbers))
            continue
        size = -(-length // parts)
        pieces += [(*(array[low : low + size] for array in arrays), *numbers) for low in range(0, length, size)]
    if threads > 1 and len(pieces) > 1:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(loop, *piece) for piece in pieces]:
                done.result()
        return
    for piece in pieces:
        loop(*piece)


def _as_array(tensor: Tensor) -> Any:
    """A tensor's numbers, or its bits where it is of 16 bits; in memory that both share."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    tensor = tensor if tensor.dim() == 1 else tensor.view(-1)
    return (tensor.view(torch.int16) if tensor.element_size() == 2 else tensor).numpy()
