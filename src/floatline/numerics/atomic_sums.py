"""scatter_add and index_add in 16 bits on the CPU, rounded after every addition as a GPU's atomics are."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def scatter_add_atomically(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The result of aten's scatter_add or index_add, or of their in-place forms, as CUDA computes it.

    torch's CPU kernels add in float32 and round once. CUDA's add each number to memory by an atomic operation in the
    tensor's own format: the sum of 5,000 ones is 2,048 in float16, and 256 in bfloat16.

    Numerics:
        Every addition is rounded to the format, in the order of the source. On a GPU the order varies.
        Checked by tests/numerics/test_atomic_sums.py.

    Args:
        name: 'scatter_add' or 'index_add', with '_' where it writes in place.
        args: Target, dimension, index and source, by position.
        kwargs: `alpha` of index_add.
    """
    target, dim, index, source = args[:4]
    result = target if name.endswith("_") else target.clone()
    if target.dim() == 0 or index.numel() == 0 or source.numel() == 0:
        return getattr(result, f"{name.rstrip('_')}_")(*args[1:], **kwargs)
    if name.startswith("index_add"):
        alpha = kwargs.get("alpha", 1)
        source = source if alpha == 1 else source * alpha
        rows = result.movedim(dim, 0)
        wanted = source.movedim(dim, 0).reshape(len(index), -1)
        added = _add_rows(rows.reshape(len(rows), -1), index, wanted)
        rows.copy_(added.view(rows.shape))
        return result
    # What lies beyond the index in the source is not read.
    source = source[tuple(slice(size) for size in index.shape)]
    if dim % target.dim() == 0 and target.dim() > 1 and all(stride == 0 for stride in index.stride()[1:]):
        # One index for each row, as graph libraries expand it.
        part = result[(slice(None), *(slice(size) for size in index.shape[1:]))]
        first = index[(slice(None), *[0] * (index.dim() - 1))]
        added = _add_rows(part.reshape(len(part), -1), first, source.reshape(len(first), -1))
        part.copy_(added.view(part.shape))
        return result
    places = torch.arange(result.numel(), device=result.device).view(result.shape)
    places = places[
        tuple(slice(size) if d != dim % target.dim() else slice(None) for d, size in enumerate(index.shape))
    ]
    places = places.gather(dim, index)
    added = _add_rows(result.reshape(-1, 1), places.reshape(-1), source.reshape(-1, 1))
    result.copy_(added.view(result.shape))
    return result


def _add_rows(target: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """Rows of a new tensor: those of the target, and to each its rows of the source, one after the other."""
    result = target.clone()
    touched, place, counts = cast(
        "tuple[Tensor, Tensor, Tensor]", index.unique(return_inverse=True, return_counts=True)
    )
    # Rows that get the most come first, so that in each round the rows that get one more are the first ones.
    order = counts.argsort(descending=True, stable=True)
    rank_of = torch.empty_like(order)
    rank_of[order] = torch.arange(len(order), device=order.device)
    rank = rank_of[place]
    by_row = rank.argsort(stable=True)
    starts = counts[order].cumsum(0) - counts[order]
    turn = torch.empty_like(rank)
    turn[by_row] = torch.arange(len(rank), device=rank.device) - starts[rank[by_row]]
    by_turn = (turn * len(order) + rank).argsort()
    sums = result[touched[order]]
    sizes = cast("list[int]", torch.bincount(turn).tolist())
    turns = cast("tuple[Tensor, ...]", source[by_turn].split(sizes))
    for rows, size in zip(turns, sizes, strict=True):
        sums[:size].add_(rows)
    result[touched[order]] = sums
    return result
