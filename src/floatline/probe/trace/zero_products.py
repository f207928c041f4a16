"""Zero products: where NaN and inf are multiplied by an exact 0, which leaves them NaN."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from floatline.probe.trace.measures import fetch
from floatline.probe.trace.schemas import TracedCall
from floatline.probe.trace.trace import Op

# What `mul` multiplies, or a matrix product sums over, by the place of its factors.
_FACTORS = {"mul": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


class ZeroProducts:
    """Counts, in products of two tensors, the factors that are not finite, and those of them that only meet zeros.

    On a GPU only products element by element of the forward pass are asked, since figures come later there.

    Numerics:
        Counts are exact. Of a matrix product they are those of the places that it sums over: a row of one factor that
        is not finite somewhere, and a column of the other that is 0 everywhere. On a GPU, products that overflow count
        as not finite, too: there it would take twelve operations for each product to tell them apart, and takes six.
        Checked by tests/probe/trace/test_zero_products.py.
    """

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}
        self._later: list[tuple[Op, Tensor]] = []

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
        else:
            if call.schema.base == "mul" and op.phase != "backward" and not (a.requires_grad and b.requires_grad):
                self._later.append((op, count_met(a, b)))
            return
        self._counts[op.index] = _count(a, b) if call.schema.base == "mul" else _count_sums(a, b)

    def read(self) -> dict[str, list[int]]:
        """By the index of an operation: factors that meet a 0 and are not finite, and all that are not finite.

        Figures must have been read.
        """
        found = {str(index): cast("list[int]", count.tolist()) for index, count in self._counts.items()}
        for (op, _), (met,) in zip(self._later, fetch([met for _, met in self._later]), strict=True):
            found[str(op.index)] = [met, sum(out.nonfinite for out in op.outputs)]
        return {index: counts for index, counts in found.items() if counts[0]}


def count_met(a: Tensor, b: Tensor) -> Tensor:
    """Factors that are not finite and meet a 0: their product is NaN, as that of a 0 and a finite number never is."""
    product = a * b
    return (product != product).gt(a.logical_and(b)).sum().view(1)  # NaN is true, as all but 0 is


def _count(a: Tensor, b: Tensor) -> Tensor:
    bad_a, bad_b = ~a.isfinite(), ~b.isfinite()
    met = (bad_a & (b == 0)) | (bad_b & (a == 0))
    return torch.stack([met.sum(), (bad_a | bad_b).sum()])


def _count_sums(a: Tensor, b: Tensor) -> Tensor:
    bad_a, bad_b = (~a.isfinite()).any(-2), (~b.isfinite()).any(-1)
    met = (bad_a & (b == 0).all(-1)) | (bad_b & (a == 0).all(-2))
    return torch.stack([met.sum(), (bad_a | bad_b).sum()])
