"""Zero products: where NaN and inf are multiplied by an exact 0, which leaves them NaN."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from floatline.probe.trace.schemas import TracedCall
from floatline.probe.trace.trace import Op

# What `mul` multiplies, or a matrix product sums over, by the place of its factors.
_FACTORS = {"mul": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


class ZeroProducts:
    """Counts, in products of two tensors, the factors that are not finite, and those of them that only meet zeros.

    On a GPU only products element by element of the forward pass are asked, since figures come later there.

    Numerics:
        Counts are exact. Of a matrix product they are those of the places that it sums over: a row of one factor that
        is not finite somewhere, and a column of the other that is 0 everywhere.
        Checked by tests/probe/trace/test_zero_products.py.
    """

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}

    def note(self, op: Op, call: TracedCall) -> None:
        """Count, before the operation runs and may write over a factor."""
        start = _FACTORS.get(call.schema.base)
        if op.phase != "update" and call.schema.base == "mul" and any(map(math.isinf, op.scalars)):
            (argument,) = call.tensors
            self._counts[op.index] = (argument.tensor == 0).sum().repeat(2)  # a number of the code, such as -inf
            return
        if start is None or len(call.tensors) != start + 2 or len(op.inputs) < start + 2 or op.phase == "update":
            return
        a, b = (argument.tensor for argument in call.tensors[start:])
        if a.layout is not torch.strided or b.layout is not torch.strided or a.is_meta:
            return
        if a.device.type == "cpu" and b.device.type == "cpu":
            first, second = (operand.value for operand in op.inputs[start : start + 2])
            if not (first.nonfinite and second.zeros) and not (second.nonfinite and first.zeros):
                return
        elif call.schema.base != "mul" or op.phase == "backward" or (a.requires_grad and b.requires_grad):
            return
        self._counts[op.index] = _count(a, b) if call.schema.base == "mul" else _count_sums(a, b)

    def read(self) -> dict[str, list[int]]:
        """By the index of an operation: factors that meet a 0 and are not finite, and all that are not finite."""
        found = {str(index): cast("list[int]", count.tolist()) for index, count in self._counts.items()}
        return {index: counts for index, counts in found.items() if counts[0]}


def _count(a: Tensor, b: Tensor) -> Tensor:
    bad_a, bad_b = _is_bad(a), _is_bad(b)
    met = (bad_a & (b == 0)) | (bad_b & (a == 0))
    return torch.stack([met.sum(), (bad_a | bad_b).sum()])


def _count_sums(a: Tensor, b: Tensor) -> Tensor:
    bad_a, bad_b = _is_bad(a).any(-2), _is_bad(b).any(-1)
    met = (bad_a & (b == 0).all(-1)) | (bad_b & (a == 0).all(-2))
    return torch.stack([met.sum(), (bad_a | bad_b).sum()])


def _is_bad(x: Tensor) -> Tensor:
    """Where it is inf or NaN, by two operations instead of `isfinite`'s five."""
    return x * 0 != 0
