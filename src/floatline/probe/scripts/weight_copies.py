"""Weights: copies of tensors, to be put back where they came from."""

# torch shows its copies of many tensors to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from floatline.numerics import foreach
from floatline.probe.watch.gradient_scales import largest_of
from floatline.probe.watch.patches import Aside

# A copy for each step is made of no more than that; one for a failing step is.
_MOST = 2**24


@dataclass
class Weights:
    """Tensors and their copies, on the same device.

    Args:
        tensors: The weights.
        copies: What they held.
    """

    tensors: list[Tensor]
    copies: list[Tensor]

    @classmethod
    def copy(cls, tensors: Sequence[Tensor], *, most: bool = False) -> Weights | None:
        """Copy weights; None where there are too many.

        Args:
            tensors: The weights.
            most: Whether 16 million are the most.
        """
        if most and sum(tensor.numel() for tensor in tensors) > _MOST:
            return None
        with Aside():
            return cls(list(tensors), [tensor.detach().clone() for tensor in tensors])

    @classmethod
    def refresh(cls, old: Weights | None, tensors: Sequence[Tensor]) -> Weights | None:
        """Copy weights into the memory of an older copy; None where a GPU has not enough memory for one."""
        if old is None or len(old.tensors) != len(tensors):
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 2 * size:
                return None
            return cls.copy(tensors)
        with Aside():
            foreach.copy_(old.copies, list(tensors))
        return old

    @classmethod
    def merge(cls, parts: Iterable[Weights]) -> Weights | None:
        """Several copies as one; None where there is none."""
        found = list(parts)
        tensors = [tensor for part in found for tensor in part.tensors]
        return cls(tensors, [copy for part in found for copy in part.copies]) if found else None

    @property
    def on_cpu(self) -> bool:
        """Whether they can be looked at without waiting."""
        return all(tensor.device.type == "cpu" for tensor in self.tensors[:1])

    def put_back(self) -> None:
        """Write the copies over the weights; autograd does not see it."""
        with Aside():
            for tensor, copy in zip(self.tensors, self.copies, strict=True):
                tensor.data.copy_(copy)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor holds inf or NaN."""
    largest = largest_of([tensor for tensor in tensors if tensor.is_floating_point()])
    with Aside():
        return largest is None or bool(largest.isfinite().all())
