"""Launching a kernel again: what Triton does to bind and look up a kernel takes longer than a small kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from torch import Tensor

# Of a thread on an NVIDIA GPU, for kernels that need a few more: so few let 32 warps share a multiprocessor.
FEW_REGISTERS = {"maxnreg": 64} if torch.version.hip is None else {}


class Launches:
    """Kernels that were launched before over the same tables, ready to be launched again.

    The first launch is Triton's own. It gives the compiled kernel, and that is called from then on, with the
    arguments in its order. Where it cannot be (in Triton's interpreter, or in a version of Triton that wants them
    in another way), every launch is Triton's own.
    """

    def __init__(self) -> None:
        self._again: dict[Hashable, Callable[..., object] | None] = {}

    def __call__(
        self, kernel: Any, grid: int, args: tuple[Any, ...], constants: dict[str, Any], *, key: Hashable, **options: Any
    ) -> None:
        """Launch a kernel.

        Args:
            kernel: From triton.jit, with its constants after all other parameters.
            grid: How many programs.
            args: What the kernel takes before its constants.
            constants: Its constants by name, in its order.
            key: Differs between launches that differ in kernel, grid, constants, options, or in what Triton compiles
                for: see `kind_of`.
            options: Triton's options: num_warps and so on.
        """
        again = self._again.get(key)
        if again is not None:
            again(*args, *constants.values())
            return
        compiled = kernel[(grid,)](*args, **constants, **options)
        if key not in self._again:
            self._again[key] = _runner(compiled, grid)


def _runner(compiled: Any, grid: int) -> Callable[..., object] | None:
    """The compiled kernel, to be called with all of its arguments; None where it cannot be."""
    # Triton's interpreter gives nothing back. Before 3.3 a compiled kernel is called without its constants.
    if compiled is None or tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        return None
    return compiled[(grid, 1, 1)]


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """What Triton compiles for of a tensor that is another one in every call: its dtype, and its alignment."""
    return tensor.dtype, tensor.data_ptr() % 16 == 0
