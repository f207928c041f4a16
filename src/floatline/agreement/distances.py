"""How far two tensors are apart: as a whole, and row by row against what rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import Tensor

from floatline.agreement.arithmetic import SPREAD

# The lowest number of a format stands for "not at all" in masks: another number in each format, and the same meaning.
_MASKED, _LEAST_MASK = 1e30, 6e4
_FEW = 8


@dataclass(frozen=True)
class Noise:
    """How far rounding alone moves a tensor.

    Args:
        rows: Expected norm of the error of each row.
    """

    rows: Tensor

    def at_least(self, other: Noise) -> Noise:
        """The larger of both, row by row."""
        return Noise(self.rows.maximum(other.rows))

    @cached_property
    def whole(self) -> float:
        """Expected norm of the error of the whole tensor."""
        return float(_norm(self.rows))


def measure_noise(plain: Tensor, nudged: Sequence[Tensor]) -> Noise:
    """What rounding explains, from a run and runs whose roundings were moved by one unit.

    Numerics:
        Where anything was rounded, it is at least the last rounding of the numbers themselves: a few runs of one number
        may happen to end where they began.
    """
    apart = torch.stack([_row_norms(moved, plain) for moved in nudged])
    rows = apart.square().mean(0).sqrt() / SPREAD
    if plain.is_floating_point() and bool((rows > 0).any()):
        rows = rows.maximum(_row_norms(plain) * torch.finfo(plain.dtype).eps / SPREAD / 2)
    return Noise(rows)


def measure_distance(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||, over what is finite in the truth.

    Numerics:
        Sums in float64. inf where one of both is not finite, where the shapes differ, or where the truth is all 0 and x
        is not. Equal infinities, and the lowest numbers of formats, as in masked logits, are equal.
        Checked by tests/agreement/test_distances.py.
    """
    return measure_apart(x, truth, truth)


def measure_apart(x: Tensor, y: Tensor, truth: Tensor) -> float:
    """||x - y|| / ||truth||; see `measure_distance`."""
    if x.shape != y.shape:
        return math.inf
    size, apart = (float(_norm(rows)) for rows in (_row_norms(truth), _row_norms(x, y)))
    return apart / size if size else (math.inf if apart else 0.0)


def measure_excess(x: Tensor, truth: Tensor, noise: Noise) -> tuple[float, tuple[int, ...]]:
    """How many times farther from the truth a tensor is than rounding explains, and the row that is the farthest.

    Numerics:
        The larger of two: of the whole tensor; and that of the worst row over how far the worst of n rows of d numbers
        is off by chance, 1 + sqrt(2 log(n) / d), at least 2. The noise of a row is at least a quarter of the rows'
        mean, and of rows of less than 8 numbers the mean itself: too few numbers to know it.
        Checked by tests/agreement/test_distances.py.
    """
    if x.shape != truth.shape:
        return math.inf, ()
    rows = _row_norms(x, truth)
    if not rows.numel():
        return 0.0, ()
    whole = noise.whole
    num = rows.numel()
    size = x.shape[-1] if x.dim() else 1
    least = whole / math.sqrt(num) / (1 if size < _FEW else 4)
    chance = max(2.0, 1 + math.sqrt(2 * math.log(num) / max(size, 1)))
    ratios = rows / (noise.rows.square() + least**2).sqrt()
    ratios = torch.where(rows == 0, 0.0, ratios)
    found = (ratios.amax(), ratios.argmax().double(), _norm(rows))
    highest, worst, apart = cast("list[float]", torch.stack(found).tolist())
    of_whole = apart / whole if whole else (math.inf if apart else 0.0)
    place = np.unravel_index(int(worst), tuple(x.shape[:-1])) if x.dim() > 1 else ()
    return max(of_whole, highest / chance), tuple(int(index) for index in place)


def _row_norms(x: Tensor, truth: Tensor | None = None) -> Tensor:
    """The norm of each row, or of its difference to the truth's: see `_difference` and `_finite`."""
    wide = x.detach().double()
    size = _norms_of_rows(wide)
    if truth is None:
        return size if _is_plain(size) else _norms_of_rows(_finite(x))
    apart = _norms_of_rows(wide - truth.detach())
    # Nine of ten tensors hold nothing to look at twice, which takes twenty operations.
    return apart if _is_plain(size.maximum(apart)) else _norms_of_rows(_difference(x, truth))


def _norms_of_rows(x: Tensor) -> Tensor:
    return _norm(x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(1, -1), -1)


def _norm(x: Tensor, dim: int | None = None) -> Tensor:
    return cast("Tensor", torch.linalg.vector_norm(x, dim=dim))  # pyright: ignore[reportUnknownMemberType]


def _is_plain(norms: Tensor) -> bool:
    """Whether these are norms of finite numbers that mask nothing."""
    return bool((norms < _MASKED / 2).all())


def _difference(x: Tensor, truth: Tensor) -> Tensor:
    """The difference in float64: inf where one of both is not finite; 0 where both are the same, or mask the same."""
    x, truth = x.detach().double(), truth.detach().double()
    masked = (truth.abs() > _MASKED) & (x.abs() >= _LEAST_MASK) & (x.sign() == truth.sign())
    same = (x == truth) | (x.isnan() & truth.isnan()) | masked
    apart = torch.where(same, 0.0, x - truth)
    return torch.where(apart.isnan(), math.inf, apart)


def _finite(x: Tensor) -> Tensor:
    x = x.detach().double()
    return torch.where(x.abs() <= _MASKED, x, 0.0)
