"""TF32: the products of FP32 modules at the speed of tensor cores, with FP32's range and FP16's precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import torch


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
