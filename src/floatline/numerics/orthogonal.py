"""Newton–Schulz: a matrix made nearly orthogonal by matrix products alone, in BF16, FP16 or FP32."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor

from floatline.errors import TensorError

NewtonSchulzName = Literal["bf16", "fp16", "fp32"]
Coefficients = tuple[float, float, float]
NS_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Keller Jordan's: the steepest at zero of those that end between 0.7 and 1.2. https://kellerjordan.github.io/posts/muon
COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
_ROOM = 32768.0  # half of what FP16 holds: the other half is for rounding


def newton_schulz(
    matrix: Tensor, dtype: NewtonSchulzName, *, coefficients: Coefficients, steps: int, eps: float
) -> tuple[Tensor, float]:
    """The matrix with every singular value brought near 1: x ← a·x + (b·x·xᵀ + c·(x·xᵀ)²)·x, from x / ‖x‖.

    Numerics:
        With the default coefficients singular values end between 0.68 and 1.21 where they began above 3/1000 of the
        norm: it is the polynomial that leaves them there, not the rounding. docs/muon.md has what each dtype adds.
        "bf16" is bit for bit torch.optim.Muon's. "fp16" keeps every matrix multiplied by `half_scale`, a power of two,
        so that neither small elements vanish nor large ones overflow; products are summed in float32.
        Checked by tests/numerics/test_orthogonal.py.

    Args:
        matrix: Two dimensions; not modified.
        dtype: What the products are computed in.
        coefficients: a, b and c.
        steps: How often.
        eps: The least norm that is divided by.

    Returns:
        The result in the dtype of its products, and what it is to be divided by.
    """
    a, b, c = coefficients
    scale = scale_of(dtype, coefficients, steps)
    tall = matrix.size(0) > matrix.size(1)
    x = _normalized(matrix, dtype, scale=scale, eps=eps)
    x = x.T if tall else x
    gram, poly = x.new_empty(2, x.size(0), x.size(0)).unbind()
    spare, other = torch.empty_like(x, memory_format=torch.contiguous_format), x
    if not x.is_contiguous():
        other = torch.empty_like(spare)
    for _ in range(steps):
        torch.addmm(gram, x, x.T, beta=0, alpha=1 / scale, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c / scale, out=poly)
        torch.addmm(x, poly, x, beta=a, alpha=1 / scale, out=spare)
        x, spare, other = spare, other, spare
    return (x.T if tall else x), scale


def _normalized(matrix: Tensor, dtype: NewtonSchulzName, *, scale: float, eps: float) -> Tensor:
    """A new matrix whose norm is the scale."""
    if dtype == "bf16":  # torch.optim.Muon's way, with the norm of what was rounded
        x = matrix.to(torch.bfloat16, copy=True)
        return x.div_(_norm(x).clamp(min=eps))
    x = matrix.to(torch.float32)
    return (x / (_norm(x).clamp(min=eps) / scale)).to(NS_DTYPES[dtype])


def _norm(matrix: Tensor) -> Tensor:
    return cast("Any", matrix).norm()


def scale_of(dtype: NewtonSchulzName, coefficients: Coefficients, steps: int) -> float:
    """What `newton_schulz` multiplies every matrix by."""
    return half_scale(coefficients, steps) if dtype == "fp16" else 1.0


@cache
def half_scale(coefficients: Coefficients, steps: int) -> float:
    """The largest power of two by which every matrix of the iteration may be multiplied in FP16.

    Numerics:
        No element is larger than the largest singular value, and those follow the polynomial from [0, 1]; half of
        FP16's range is left for rounding. 8192 for the default coefficients: elements of 7.5e-9
        and more keep all 11 bits.

    Args:
        coefficients: a, b and c.
        steps: How often.
    """
    a, b, c = coefficients
    values, largest = [i / 1000 for i in range(1011)], 1.0
    for _ in range(steps):
        squares = [x * x for x in values]
        polys = [b * s + c * s * s for s in squares]
        values = [a * x + p * x for x, p in zip(values, polys, strict=True)]
        largest = max(largest, *squares, *map(abs, polys), *map(abs, values))
        if not largest < _ROOM:
            raise TensorError(
                f"Coefficients {coefficients} take singular values up to {largest:g} in {steps} steps, and FP16 ends "
                "at 65504. Use coefficients that keep them near 1, or fp32."
            )
    return 2.0 ** math.floor(math.log2(_ROOM / largest))
