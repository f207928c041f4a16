"""What is known of the memory behind tensors: which operation wrote it, its role, its FP32 twin."""
# torch shows its storages to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from floatline.optim.mesh import local_part
from floatline.probe.trace.trace import Values

_PURGE_EVERY = 256  # new entries
_PURGE_BYTES = 1 << 28  # of new twins

Geometry = tuple[Any, ...]


@dataclass(slots=True)
class StorageFacts:
    """What is known of one storage.

    Args:
        weak: Holds its address, not its memory.
        made_by: The operation that last wrote it.
        roles: Roles of tensors in it, by offset.
        dtype: The dtype that the twin stands for.
        twin: Its twin, element for element; None: it is its own twin.
        values: Figures of views of it, until it is written again.
    """

    weak: StorageWeakRef
    made_by: int | None = None
    roles: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    dtype: torch.dtype | None = None
    twin: Tensor | None = None
    values: dict[Geometry, Values] = field(default_factory=dict[Geometry, Values])

    def role(self, offset: int) -> str:
        """Role of the tensor that the element at an offset belongs to."""
        i = bisect_right(self.roles, (offset, "\x7f" * 8))
        return self.roles[max(i - 1, 0)][1] if self.roles else ""


class Storages:
    """The memory of a step. Entries go when their storage goes."""

    def __init__(self) -> None:
        self._known: dict[int, StorageFacts] = {}
        self._new = 0
        self._new_bytes = 0

    def find(self, tensor: Tensor) -> StorageFacts | None:
        """What is known of the memory of a tensor."""
        key = storage_key(tensor)
        return None if key is None else self._known.get(key)

    def open(self, tensor: Tensor) -> StorageFacts | None:
        """The entry of the memory of a tensor, made where there is none; None where it has no storage."""
        key = storage_key(tensor)
        if key is None:
            return None
        memory = self._known.get(key)
        if memory is None:
            memory = self._known[key] = StorageFacts(StorageWeakRef(tensor.untyped_storage()))
            self._new += 1
            if self._new > _PURGE_EVERY:
                self._purge()
        return memory

    def grew(self, num_bytes: int) -> None:
        """Note a new twin."""
        self._new_bytes += num_bytes
        if self._new_bytes > _PURGE_BYTES:
            self._purge()

    def name(self, tensor: Tensor, role: str) -> None:
        """Give a tensor a role, or this process's part of it; the first one counts."""
        tensor = local_part(tensor)
        memory = self.open(tensor)
        offset = int(tensor.storage_offset()) if memory is not None else 0
        if memory is not None and all(offset != known for known, _ in memory.roles):
            memory.roles = sorted([*memory.roles, (offset, role)])

    def alive_makers(self) -> list[int]:
        """The operations that last wrote the memory that is still held by someone."""
        return sorted({m.made_by for m in self._known.values() if m.made_by is not None and not m.weak.expired()})

    def _purge(self) -> None:
        for key in [key for key, memory in self._known.items() if memory.weak.expired()]:
            del self._known[key]
        self._new = self._new_bytes = 0


def storage_key(tensor: Tensor) -> int | None:
    """What tensors that share memory have in common; None where a tensor has no memory of its own kind."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage()._cdata


def geometry(tensor: Tensor) -> Geometry:
    """What tells one view of a storage from another."""
    return (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor shows every element of its storage once."""
    return tensor.nbytes == tensor.untyped_storage().nbytes() and (
        tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    )


def weights_of(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of every parameter and buffer."""
    for name, parameter in model.named_parameters():
        yield "param", name, parameter
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer


def name_start(storages: Storages, model: nn.Module, batch: tuple[Sequence[Any], Sequence[Any]]) -> None:
    """Name what a step starts from."""
    for kind, name, tensor in weights_of(model):
        storages.name(tensor, f"{kind}:{name}")
    for role, tensor in batch_tensors(batch):
        storages.name(tensor, role)


def batch_tensors(batch: tuple[Sequence[Any], Sequence[Any]]) -> Iterator[tuple[str, Tensor]]:
    """Role and tensor of what a batch holds, such as 'inputs[0]'."""
    for kind, tensors in zip(("inputs", "targets"), batch, strict=True):
        for i, value in enumerate(tensors):
            if isinstance(value, Tensor):
                yield f"{kind}[{i}]", value


def name_state(storages: Storages, model: nn.Module, optimizer: Any) -> None:
    """Name the state that an optimizer keeps for the parameters of a model."""
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(value, Tensor):
                storages.name(value, f"state:{names.get(id(parameter), '')}.{key}")
