"""Figures of many tensors on one device: a row each, filled by one launch, read together."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from floatline.optim.kernels.launches import FEW_REGISTERS, Launches, kind_of
from floatline.probe.trace import measure_kernel

_ROWS = 4096  # of one table; 104 bytes each
_BLOCK = 1024
_MOST_PROGRAMS = 1024
_INF_BITS = 0x7F800000
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Rows:
    """Measures tensors on a device that Triton knows, without waiting for it.

    Numerics:
        The figures of `reduce_on_device`: counts and magnitudes exactly; norms are sums of the same float64 squares
        in an order that is not fixed. Checked by tests/probe/trace/test_measures.py.
    """

    def __init__(self) -> None:
        self._launches = Launches()
        self._tables: list[tuple[Tensor, Tensor, Tensor]] = []
        self._twins: list[bool] = []  # whether a row has a twin

    def takes(self, x: Tensor, twin: Tensor | None) -> bool:
        """Whether the kernel can read these."""
        return x.dtype in _DTYPES and (twin is None or twin.dtype == torch.float32)

    def measure(self, x: Tensor, twin: Tensor | None) -> None:
        """Fill the next row."""
        row = len(self._twins) % _ROWS
        if row == 0:
            shapes = ((7, torch.int64), (3, torch.int32), (2, torch.float64))
            table = [torch.zeros(_ROWS, n, dtype=dtype, device=x.device) for n, dtype in shapes]
            self._tables.append((table[0], table[1], table[2]))
            self._nothing = torch.zeros(4, dtype=torch.float32, device=x.device)  # where a twin would be
        x, twin = _flat(x, twin)
        tensors = (x, self._nothing if twin is None else twin, *self._tables[-1])
        grid = _num_programs(x) + 1
        key = (grid, x.numel() >= 1 << 31, kind_of(x), kind_of(tensors[1]))
        values = (*tensors, x.numel(), row, int(twin is not None))
        constants = {"BLOCK": _BLOCK}
        self._launches(measure_kernel.measure_kernel, grid, values, constants, key=key, num_warps=4, **FEW_REGISTERS)
        self._twins.append(twin is not None)

    def count_stuck(self, before: Tensor, exact: Tensor, result: Tensor) -> Tensor | None:
        """Two counts, as those of `measures.count_stuck`; None of what the kernel cannot read."""
        tensors = (before, exact, result)
        known = all(t.dtype in _DTYPES and t.is_contiguous() for t in tensors) and exact.dtype == torch.float32
        if not known or not before.numel():
            return None
        counts = torch.zeros(2, dtype=torch.int64, device=before.device)
        grid = _num_programs(before)
        key = ("stuck", grid, before.numel() >= 1 << 31, *map(kind_of, tensors))
        values = (*tensors, counts, before.numel())
        self._launches(measure_kernel.stuck_kernel, grid, values, {"BLOCK": _BLOCK}, key=key, num_warps=4)
        return counts

    def read(self) -> list[tuple[list[int], list[float]]]:
        """Counts and magnitudes of every row, in the order of `reduce_on_device`; waits for the device."""
        rows: list[tuple[list[int], list[float]]] = []
        for number, table in enumerate(self._tables):
            counts, bits, squares = (part[: len(self._twins) - number * _ROWS] for part in table)
            bits[:, 1] = _INF_BITS - bits[:, 1]
            sizes = bits.view(torch.float32).double()
            norms = squares.sqrt()
            both = torch.cat([sizes[:, :2], sizes[:, 2:], norms], 1)
            rows += zip(cast("list[Any]", counts.tolist()), cast("list[Any]", both.tolist()), strict=True)
        read = [(c, s) if twin else (c[:4], s[:2]) for (c, s), twin in zip(rows, self._twins, strict=True)]
        self._tables, self._twins = [], []
        return read


def _num_programs(x: Tensor) -> int:
    return min(-(-x.numel() // (4 * _BLOCK)), _MOST_PROGRAMS)


def _flat(x: Tensor, twin: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both without gaps and with their elements in the same order."""
    if twin is not None and twin.stride() != x.stride():
        return x.contiguous(), twin.contiguous()
    if x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(x):
        return x, twin
    return x.contiguous(), None if twin is None else twin.contiguous()
