"""Host copies: how the tensors of a state lie in blocks of host memory, and how they get there and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from floatline.errors import GuardError

# torch rounds pinned memory up to a power of two: in blocks of this size it is exact but for the last one, while a
# single block for everything could take twice the budget.
_BLOCK = 1 << 26
_ALIGN = 16  # bytes of the largest element there is, so that every tensor can begin behind any other

Pieces: TypeAlias = "dict[str, list[Tensor]]"
"""Flat host memory of every tensor by name, in order; a tensor that crosses the end of a block has several."""


@dataclass(frozen=True)
class CopyPlace:
    """One tensor: what it looks like, and where it lies.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        device: Where the live tensor is.
        order: Its dimensions, the widest stride first: permuted so, it is contiguous, whatever its memory format.
        start: Its first byte, counted through all blocks.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    start: int

    def flat(self, part: Tensor) -> Tensor:
        """The numbers of a tensor in the order of this place: a view where its memory allows one, else a copy."""
        return part.permute(self.order).reshape(-1)

    def whole(self, flat: Tensor) -> Tensor:
        """What `flat` was called on, as a view."""
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return flat.view([self.shape[dim] for dim in self.order]).permute(back)


class Layout:
    """Where each tensor lies.

    Args:
        parts: Plain tensors by name.
    """

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self.places: dict[str, CopyPlace] = {}
        end = 0
        for name, part in parts.items():
            start = -(-end // _ALIGN) * _ALIGN
            order = tuple(sorted(range(part.dim()), key=lambda dim, part=part: -part.stride(dim)))
            self.places[name] = CopyPlace(part.shape, part.dtype, part.device, order, start)
            end = start + part.numel() * part.element_size()
        self.nbytes = end

    @property
    def home(self) -> torch.device:
        """The first device of the tensors that is not the CPU; the CPU where all are there."""
        devices = [place.device for place in self.places.values()]
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def fits(self, parts: Mapping[str, Tensor]) -> bool:
        """Whether these are the tensors it was made for, or others that look the same."""
        return self.places.keys() == parts.keys() and all(
            (place.shape, place.dtype, place.device) == (parts[name].shape, parts[name].dtype, parts[name].device)
            for name, place in self.places.items()
        )

    def check(self, parts: Mapping[str, Tensor]) -> None:
        """GuardError with the name of the first tensor that is missing, additional or different."""
        for name in self.places.keys() ^ parts.keys():
            side = "not in the snapshot" if name in parts else "in the snapshot, but not live"
            raise GuardError(f"Tensor '{name}' is {side}. Restore into the tensors the snapshot was taken of.")
        for name, place in self.places.items():
            have, part = (tuple(place.shape), place.dtype), parts[name]
            if have != (tuple(part.shape), part.dtype):
                raise GuardError(
                    f"Tensor '{name}' is {part.dtype} {tuple(part.shape)}, and in the snapshot {have[1]} {have[0]}. "
                    "Restore into the tensors the snapshot was taken of."
                )

    def allocate(self) -> Pieces:
        """Memory for one copy of everything, pinned where a GPU writes to it."""
        pinned = any(place.device.type == "cuda" for place in self.places.values())
        sizes = [min(_BLOCK, self.nbytes - start) for start in range(0, self.nbytes, _BLOCK)]
        blocks = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for size in sizes]
        return {name: list(_cut(place, blocks)) for name, place in self.places.items()}

    def store(self, parts: Mapping[str, Tensor], pieces: Pieces) -> None:
        """Copy the tensors to the host, in the order of the current streams."""
        for name, place in self.places.items():
            flat, first = place.flat(parts[name]), 0
            for piece in pieces[name]:
                piece.copy_(flat[first : first + piece.numel()], non_blocking=flat.is_cuda)
                first += piece.numel()

    def load(self, parts: Mapping[str, Tensor], pieces: Pieces) -> None:
        """Copy back into the tensors, in place and in the order of the current streams."""
        for name, place in self.places.items():
            part, first = parts[name], 0
            flat = place.flat(part)
            for piece in pieces[name]:
                flat[first : first + piece.numel()].copy_(piece, non_blocking=flat.is_cuda)
                first += piece.numel()
            if flat.data_ptr() != part.data_ptr():
                part.copy_(place.whole(flat))

    def gather(self, name: str, pieces: Pieces) -> Tensor:
        """The host copy of one tensor, in its shape."""
        place, own = self.places[name], pieces[name]
        if not own:
            return torch.empty(place.shape, dtype=place.dtype, device="cpu")
        return place.whole(own[0] if len(own) == 1 else torch.cat(own))


def _cut(place: CopyPlace, blocks: list[Tensor]) -> list[Tensor]:
    """The stretches of the blocks that belong to a place."""
    start, left = place.start, math.prod(place.shape) * place.dtype.itemsize
    pieces: list[Tensor] = []
    while left:
        block = blocks[start // _BLOCK]
        first = start % _BLOCK
        piece = block[first : first + left].view(place.dtype)
        pieces.append(piece)
        start, left = start + piece.numel() * place.dtype.itemsize, left - piece.numel() * place.dtype.itemsize
    return pieces
