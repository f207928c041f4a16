"""Blocks of buffers: room for the values that they have when a step begins, and the way back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor, nn

from floatline.numerics import foreach
from floatline.numerics.moving import send

_PLAIN = (Tensor, nn.Parameter)
_version, _form = attrgetter("_version"), attrgetter("shape", "dtype", "device")


class BufferBlock(Protocol):
    """Buffers of one device, with room for the values that they have when a step begins.

    A block that is not new is asked for misfits before it keeps or settles: it sees there where its buffers lie.
    """

    tensors: list[Tensor]
    kept: list[Tensor]

    def keep(self) -> None:
        """A step begins."""
        ...

    def misfits(self) -> list[Tensor]:
        """Buffers that cannot be kept or put back by selecting."""
        ...

    def settle(self, applied: Tensor) -> None:
        """What was kept goes back unless the step was applied."""
        ...


class TorchBufferBlock:
    """A block whose buffers have one dtype, moved by torch's operations."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        sizes = [tensor.numel() for tensor in tensors]
        before, after = (torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device) for _ in range(2))
        self._before, self._after = before, after
        self.kept, self._parts_after = _split(before, tensors), _split(after, tensors)

    @torch.no_grad()
    def keep(self) -> None:
        """A step begins."""
        foreach.copy_(self.kept, self.tensors)

    def misfits(self) -> list[Tensor]:
        """Buffers that have got another shape or dtype."""
        return find_misfits(self.tensors, self.kept)

    @torch.no_grad()
    def settle(self, applied: Tensor) -> None:
        """What was kept goes back unless the step was applied."""
        foreach.copy_(self._parts_after, self.tensors)
        torch.where(send(applied, self._after.device), self._after, self._before, out=self._after)
        foreach.copy_(self.tensors, self._parts_after)


class ClonedBufferBlock:
    """Buffers that are not plain, each as a tensor of its own kind; the host puts back those that torch saw written."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.kept: list[Tensor] = []
        self._versions = list(map(_version, tensors))

    @torch.no_grad()
    def keep(self) -> None:
        """A step begins."""
        self.kept = [tensor.detach().clone() for tensor in self.tensors]
        self._versions = list(map(_version, self.tensors))

    def misfits(self) -> list[Tensor]:
        """Buffers that were written since."""
        now = map(_version, self.tensors)
        return [t for t, old, new in zip(self.tensors, self._versions, now, strict=True) if old != new]

    def settle(self, applied: Tensor) -> None:
        """Nothing goes back by selecting."""


def make_blocks(
    tensors: list[Tensor],
    *,
    fused_for: Callable[[torch.device], Callable[[list[Tensor]], BufferBlock] | None],
) -> list[BufferBlock]:
    """Blocks that hold these buffers.

    Args:
        tensors: The buffers. Those of inference mode are left out: nothing writes to them outside of it.
        fused_for: Gives what makes a block of contiguous buffers of any dtypes in few launches; None for devices
            without.
    """
    together: dict[torch.device, list[Tensor]] = {}
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    cloned: list[Tensor] = []
    makers = {device: fused_for(device) for device in {tensor.device for tensor in tensors}}
    for tensor in (tensor for tensor in tensors if not tensor.is_inference()):
        if not is_plain(tensor):
            cloned.append(tensor)
        elif makers[tensor.device] is not None and tensor.is_contiguous():
            together.setdefault(tensor.device, []).append(tensor)
        else:
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    fused = [maker(own) for device, own in together.items() if (maker := makers[device]) is not None]
    return [*fused, *map(TorchBufferBlock, alike.values()), *([ClonedBufferBlock(cloned)] if cloned else [])]


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its bytes in memory, each element with its own, so that it can be copied into."""
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def find_misfits(tensors: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """Buffers that have another shape, dtype or device than what was kept of them."""
    return [tensor for tensor, before in zip(tensors, kept, strict=True) if _form(tensor) != _form(before)]


def _split(room: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Parts of a vector, each as large and in the shape of a tensor."""
    ends = [*itertools.accumulate(tensor.numel() for tensor in tensors)]
    return [room[end - t.numel() : end].view_as(t) for end, t in zip(ends, tensors, strict=True)]
