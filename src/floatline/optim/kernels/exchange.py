"""Matrices whose rows lie on several processes made orthogonal: each gathers, turns and sends back some of them."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from floatline.numerics.orthogonal import NS_DTYPES, scale_of
from floatline.optim import mesh
from floatline.optim.rules import turn
from floatline.optim.survey import Entry


def turn_shards(batch: list[Entry], directions: list[Tensor]) -> list[tuple[Tensor, float]]:
    """This process's part of each matrix made orthogonal, and what it is to be divided by; all processes call it.

    Numerics:
        A matrix is turned whole, by one process: the same bits as where nothing is cut. What travels is float32, or
        bfloat16 where ns_dtype is "bf16", and comes back in ns_dtype. Checked by tests/optim/test_distributed.py.

    Args:
        batch: Sharded matrices of one group of processes, at most as many as processes: the first turns the first.
            Or one that is not cut into rows: then every process gathers and turns it.
        directions: This process's part of each.
    """
    params = [cast("Tensor", entry.sharded) for entry in batch]
    directions = [_packed(direction, entry) for direction, entry in zip(directions, batch, strict=True)]
    group = mesh.row_group(params[0])
    if group is None:
        return [_turn_everywhere(entry, direction) for entry, direction in zip(batch, directions, strict=True)]
    own, size = dist.get_rank(group), dist.get_world_size(group)
    shapes = [mesh.row_shapes(param, size) for param in params]
    sent = _exchange(directions, shapes, own, directions[own].dtype if own < len(batch) else torch.float32, group)
    pieces: list[Tensor] = []
    if own < len(batch):
        turned, _ = turn(torch.cat(sent), batch[own].group)
        pieces = list(cast("tuple[Tensor, ...]", turned.contiguous().split([rows for rows, _ in shapes[own]])))
    back = _send_back(pieces, shapes, batch, own, group)
    return [(part, _scale(entry)) for part, entry in zip(back, batch, strict=True)]


def _exchange(
    parts: list[Tensor], shapes: list[list[tuple[int, int]]], own: int, dtype: torch.dtype, group: Any
) -> list[Tensor]:
    """Send the part of the i-th matrix to the i-th process; what comes are the parts of this process's matrix."""
    size = dist.get_world_size(group)
    outgoing = [*parts, *[parts[0].new_empty(0)] * (size - len(parts))]
    expected = shapes[own] if own < len(parts) else [(0, 0)] * size
    return _all_to_all(outgoing, [(shape, dtype) for shape in expected], group)


def _send_back(
    pieces: list[Tensor], shapes: list[list[tuple[int, int]]], batch: list[Entry], own: int, group: Any
) -> list[Tensor]:
    size = dist.get_world_size(group)
    outgoing = pieces or [batch[0].weight.new_empty(0)] * size
    expected = [(shape[own], NS_DTYPES[entry.group["ns_dtype"]]) for shape, entry in zip(shapes, batch, strict=True)]
    expected += [((0, 0), torch.float32)] * (size - len(batch))
    return _all_to_all(outgoing, expected, group)[: len(batch)]


def _all_to_all(
    outgoing: list[Tensor], expected: list[tuple[tuple[int, int], torch.dtype]], group: Any
) -> list[Tensor]:
    """One tensor to each process and one from each, as bytes: their dtypes may differ."""
    sent = [tensor.reshape(-1).view(torch.uint8) for tensor in outgoing]
    sizes = [rows * columns * dtype.itemsize for (rows, columns), dtype in expected]
    received = sent[0].new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat(sent), sizes, [len(one) for one in sent], group=group)
    parts = cast("tuple[Tensor, ...]", received.split(sizes))
    # A copy, because bytes in the middle of a tensor may not lie where a wider number can begin.
    return [part.clone().view(dtype).view(shape) for part, (shape, dtype) in zip(parts, expected, strict=True)]


def _turn_everywhere(entry: Entry, direction: Tensor) -> tuple[Tensor, float]:
    param = cast("Tensor", entry.sharded)
    whole = cast("Any", mesh.like_param(param, "direction", direction)).full_tensor()
    # Some versions of torch leave a gap after each row, and products of such matrices have other bits.
    turned, scale = turn(whole.contiguous(), entry.group)
    return mesh.part_of(param, turned), scale


def _packed(direction: Tensor, entry: Entry) -> Tensor:
    """As it travels: what Newton–Schulz in bfloat16 would round first is rounded before."""
    return direction.to(torch.bfloat16 if entry.group["ns_dtype"] == "bf16" else torch.float32).contiguous()


def _scale(entry: Entry) -> float:
    group = entry.group
    return scale_of(group["ns_dtype"], tuple(group["ns_coefficients"]), group["ns_steps"])
