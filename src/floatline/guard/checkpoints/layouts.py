"""A checkpoint for another layout: the parts that some processes saved, put together and cut for other ones."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import torch
from torch import Tensor

from floatline.errors import GuardError
from floatline.guard.checkpoints import guard_state
from floatline.guard.run import Run
from floatline.optim import mesh
from floatline.precision.random_state import draw_random
from floatline.precision.wrappers import reshard, unwrap

Part = tuple[dict[str, Tensor], dict[str, Any]]


def fits(run: Run, tensors: dict[str, Tensor]) -> bool:
    """Whether saved weights have the shapes of the parts that this process holds."""
    held = guard_state.live_tensors(run)
    return all(name not in held or held[name].shape == tensor.shape for name, tensor in tensors.items())


def fit(run: Run, parts: list[Part], rank: int) -> Part:
    """What one process goes on from, out of what other processes saved.

    Numerics:
        Weights, optimizer states, averages, scale and windows keep every bit. A process that was there before goes on
        with its random numbers and buffers; a new one gets random numbers that follow from process 0's and its own
        number, and the buffers of process 0. Checked by tests/guard/test_guard_ranks.py.

    Args:
        run: Says what this process holds.
        parts: Tensors and state of each process that saved, in the order of ranks; of replicas all but the first
            may lack what they share.
        rank: This process.

    Raises:
        GuardError: Tensors are cut in another way than by their first dimension, or hold blocks that cannot be cut.
    """
    model = unwrap(run.model)
    reshard(model)
    shared = parts[0][0]
    own, state = parts[rank] if rank < len(parts) else parts[0]
    owners = dict(model.named_parameters())
    trained = [param for group in run.optimizer.param_groups for param in group["params"]]
    found: dict[str, Tensor] = {}
    for name, first in shared.items():
        room, _, rest = name.partition(".")
        owner = owners.get(rest) if room in ("model", "average") else None
        if room == "optimizer":
            owner = trained[int(rest.partition(".")[0])]
        if owner is None or (owner.dim() and not first.dim()):  # the guard's own, random numbers, buffers; counters
            found[name] = own.get(name, first)
            continue
        if name.endswith("_scale") and room == "optimizer":
            _check_blocks(name, owner, shared)
            found[name] = first
            continue
        whole = _join(name, owner, parts)
        part = mesh.part_of(owner, whole) if mesh.is_distributed(owner) else whole
        held = mesh.local_part(owner.detach())
        if held.shape != part.shape:
            found[name] = part  # refused by `restore`, with both shapes
            continue
        # States go through memory in the order of their weights.
        found[name] = torch.empty_like(held, dtype=part.dtype, device="cpu").copy_(part)
    if rank >= len(parts):
        drawn, fields = draw_random(run.device, _seed_of(found, rank))
        found, state = found | drawn, {**state, **fields}
    return found, state


def _join(name: str, owner: Tensor, parts: list[Part]) -> Tensor:
    """A tensor as it was before it was cut; one that fits no way is left to `restore`, which says so."""
    first = parts[0][0][name]
    pieces = [tensors[name] for tensors, _ in parts if name in tensors]
    if first.shape == owner.shape or len(pieces) == 1:
        return first
    if all(piece.dim() and piece.shape[1:] == owner.shape[1:] and piece.dtype == first.dtype for piece in pieces):
        whole = torch.cat(pieces)
        if whole.shape == owner.shape:
            return whole
    raise GuardError(
        f"{name!r} is cut over {len(parts):,} processes in another way than by rows, which cannot be put together. "
        f"Resume with {len(parts):,} processes, laid out as they were."
    )


def _check_blocks(name: str, owner: Tensor, shared: dict[str, Tensor]) -> None:
    """Refuse the scales of 8-bit blocks where a state is or was cut: blocks do not end where other parts do."""
    codes = shared.get(name.removesuffix("_scale"))
    if mesh.is_distributed(owner) or codes is None or codes.shape != owner.shape:
        raise GuardError(
            f"{name!r} belongs to 8-bit states of sharded weights, which fit the processes that saved them only. "
            "Resume in the same layout, or use states='fp32' in a new run."
        )


def _seed_of(tensors: dict[str, Tensor], rank: int) -> int:
    """Where a process begins that was not there before: it follows from process 0's random numbers and its own rank."""
    before = bytes(cast("list[int]", tensors["rng.host"].tolist()))
    digest = hashlib.sha256(before + rank.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:7], "little")
