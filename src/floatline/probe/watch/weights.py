"""LoopWeights: the weights of a loop, where they began, which of them got gradients, and FP32 master copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from floatline.optim.mesh import local_part
from floatline.probe.watch.patches import Aside

# Above this many weights, copies and comparisons cost more than they tell.
_MOST = 2**24


class LoopWeights:
    """The weights that a loop trains, by the ids of the tensors.

    Attributes:
        leaves: Tensors that received gradients.
        start: What parameters of root modules held when those were first called.
        masters: Tensors of optimizers that are FP32 copies of weights, made by hand, with those weights.
        moved: Weights outside of optimizers that move in training; None: nobody looked.
    """

    def __init__(self) -> None:
        self.leaves: dict[int, Tensor] = {}
        self.start: dict[int, Tensor] = {}
        self.masters: dict[int, list[Tensor]] = {}
        self.moved: set[int] | None = None

    def add_leaves(self, tensors: Iterable[Tensor]) -> None:
        """Tensors received gradients."""
        self.leaves |= {id(tensor): tensor for tensor in tensors}

    def keep_start(self, parameters: Sequence[Tensor]) -> None:
        """A root module is called for the first time: keep what its parameters hold."""
        copies: list[Tensor] = copy_weights(parameters) or []
        self.start |= {id(p): copy for p, copy in zip(parameters, copies, strict=False)}

    def find_masters(self, own: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        """Find copies by their values, after an optimizer has moved them: each tensor by itself, or many as a flat one.

        Numerics:
            A copy is one where the weights are its values, rounded to their dtype, bit for bit, and have moved from
            where they began: at the beginning every copy is equal, also one that nothing is copied back from.
            Checked by tests/probe/watch/test_master_copies.py.

        Args:
            own: The parameters of the root modules.
            held: What optimizers hold.
        """
        keys = {id(p) for p in held}
        loose = list({id(p): p for p in own if id(p) not in keys and p.requires_grad}.values())
        if not loose or sum(p.numel() for p in loose) > _MOST:
            return
        with Aside():  # what moves while it trains; at the end averages may be copied into a model that never did
            moved = self.moved = self.moved or set()
            moved |= {id(p) for p in loose if id(p) not in moved and self._has_moved(p)}
        names = {id(p) for p in own}
        masters = [p for p in held if id(p) not in names and id(p) not in self.masters]
        with Aside():
            for master in masters:
                if not master.is_floating_point() or master.numel() > _MOST:
                    continue
                parts = _match(master.detach().flatten(), loose)
                if parts and any(id(part) in moved for part in parts):
                    self.masters[id(master)] = parts
                    taken = {id(part) for part in parts}
                    loose = [p for p in loose if id(p) not in taken]

    def _has_moved(self, weight: Tensor) -> bool:
        start = self.start.get(id(weight))
        if start is None or start.shape != weight.shape:
            return False
        return not torch.equal(start.to(weight.device, weight.dtype), weight.detach())


def copy_weights(parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """A copy to compare with; None where it would be too large."""
    if sum(parameter.numel() for parameter in parameters) > _MOST:
        return None
    with Aside():
        return [local_part(parameter).detach().clone() for parameter in parameters]


def match_masters(masters: Sequence[Tensor], own: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """Copies by their values, before the first step, when every copy is still equal; by the ids of the copies.

    Args:
        masters: What an optimizer holds.
        own: The parameters of the root modules.
    """
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
