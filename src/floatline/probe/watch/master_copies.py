"""FP32 master copies by hand: which tensors of an optimizer are copies of which weights of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Aside

# Elements up to which values are compared.
_MOST = 2**24


def find_masters(seen: Watch) -> None:
    """Find copies by their values, after an optimizer has moved them: each tensor by itself, or many as a flat one.

    Numerics:
        A copy is one where the weights are its values, rounded to their dtype, bit for bit, and have moved from where
        they began: at the beginning every copy is equal, also one that nothing is copied back from.
        Checked by tests/probe/watch/test_master_copies.py.
    """
    held = {id(p) for made in seen.optimizers.values() for p in made.parameters}
    weights = [p for root in seen.roots.values() for p in root.parameters() if id(p) not in held and p.requires_grad]
    loose = list({id(p): p for p in weights}.values())
    if not loose or sum(p.numel() for p in loose) > _MOST:
        return
    with Aside():  # what moves while it trains; at the end averages may be copied into a model that never did
        seen.moved = seen.moved or set()
        seen.moved |= {id(p) for p in loose if id(p) not in seen.moved and _has_moved(seen, p)}
    own = {id(p) for root in seen.roots.values() for p in root.parameters()}
    masters = [p for made in seen.optimizers.values() for p in made.parameters if id(p) not in own]
    masters = [p for p in masters if id(p) not in seen.masters and p.is_floating_point() and p.numel() <= _MOST]
    with Aside():
        for master in masters:
            parts = _match(master.detach().flatten(), loose)
            if parts and any(id(part) in seen.moved for part in parts):
                seen.masters[id(master)] = parts
                taken = {id(part) for part in parts}
                loose = [p for p in loose if id(p) not in taken]


def match_masters(seen: Watch, masters: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """Copies by their values, before the first step, when every copy is still equal; by the ids of the copies."""
    own = [p for root in seen.roots.values() for p in root.parameters()]
    if sum(p.numel() for p in own) > _MOST or any(p is weight for p in masters for weight in own):
        return {}
    with Aside():
        return {id(master): parts for master in masters if (parts := _match(master.detach().flatten(), own))}


def _match(values: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The weights that a vector holds one after the other; none where a part of it is something else."""
    found: list[Tensor] = []
    offset = 0
    left = list(weights)
    while offset < values.numel():
        part = next((p for p in left if _holds(values[offset : offset + p.numel()], p)), None)
        if part is None:
            return []
        found.append(part)
        left = [p for p in left if p is not part]
        offset += part.numel()
    return found


def _holds(values: Tensor, weight: Tensor) -> bool:
    if values.numel() != weight.numel() or not weight.numel():
        return False
    return torch.equal(values.to(weight.device, weight.dtype), weight.detach().flatten())


def _has_moved(seen: Watch, weight: Tensor) -> bool:
    start = seen.start.get(id(weight))
    if start is None or start.shape != weight.shape:
        return False
    return not torch.equal(start.to(weight.device, weight.dtype), weight.detach())
