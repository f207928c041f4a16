"""A model's buffers in a step that may be skipped: kept when it begins, put back on the device where it was skipped."""

# torch shows a module's own buffers under private names only.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from floatline.numerics import foreach
from floatline.numerics.moving import send
from floatline.precision.wrappers import unwrap


@dataclass(slots=True, eq=False)
class _BufferSlot:
    """A module's buffer as it was when the step began."""

    module: nn.Module
    name: str
    tensor: Tensor | None

    @property
    def now(self) -> Tensor | None:
        return self.module._buffers.get(self.name)


class BufferBlock(Protocol):
    """Buffers of one device, with room for the values that they have when a step begins."""

    tensors: list[Tensor]
    kept: list[Tensor]

    def keep(self) -> None:
        """A step begins."""
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

    def keep(self) -> None:
        """A step begins."""
        foreach.copy_(self.kept, self.tensors)

    def settle(self, applied: Tensor) -> None:
        """What was kept goes back unless the step was applied."""
        foreach.copy_(self._parts_after, self.tensors)
        torch.where(send(applied, self._after.device), self._after, self._before, out=self._after)
        foreach.copy_(self.tensors, self._parts_after)


def _no_fused(device: torch.device) -> None:
    """No device has a faster block."""
    del device


class Buffers:
    """Keeps what a step may change of a model's buffers, and puts it back on the device where the step is skipped.

    A step begins with the guard's, or with the first forward pass in training after the last step. In the first step,
    and in the first after modules have been switched between training and evaluation, all buffers are kept, and the
    host reads which of them were changed: from then on these are kept, and those that lie in the same modules. Nothing
    is copied, and nothing launched, for modules whose buffers no step changes; the host waits for nothing, unless a
    buffer is replaced by one of another shape.

    Numerics:
        Selected, never multiplied: what was kept comes back with every bit, NaN included; what is not put back stays
        as it is. Checked by tests/guard/step/test_buffers.py.

    Attributes:
        holders: Modules with buffers; where there are none, nothing need be kept or settled.

    Args:
        model: Plain, or wrapped. Its forward pass tells when a step begins.
        fused_for: Gives what makes a block of contiguous buffers of any dtypes in few launches; None for devices
            without.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fused_for: Callable[[torch.device], Callable[[list[Tensor]], BufferBlock] | None] = _no_fused,
    ) -> None:
        self._fused_for = fused_for
        modules = cast("Iterable[nn.Module]", unwrap(model).modules())
        self.holders = [module for module in modules if module._buffers]
        self._moving: list[nn.Module] = []
        self._modes: list[bool] = []
        self._looks = False  # all buffers are kept, to see which of them change
        self._last: list[_BufferSlot] = []
        self._slots: list[_BufferSlot] | None = None  # of the step that has begun
        self._blocks: list[BufferBlock] = []
        self._hook = model.register_forward_pre_hook(self._begin) if self.holders else None

    def _begin(self, module: nn.Module, args: Any) -> None:
        del args
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.keep()

    @torch.no_grad()
    def keep(self, *, again: bool = False) -> None:
        """A step begins; where that is known already, nothing happens, unless it begins again."""
        if (self._slots is not None and not again) or not self.holders:
            return
        modes = [module.training for module in self.holders]
        looked, self._looks, self._modes = self._looks, modes != self._modes, modes
        if self._looks or looked or not self._is_as_before():
            holders = self.holders if self._looks else self._moving
            self._last = [_BufferSlot(module, name, b) for module in holders for name, b in module._buffers.items()]
            found = list({id(slot.tensor): slot.tensor for slot in self._last if slot.tensor is not None}.values())
            self._blocks = self._make_blocks(found)
        self._slots = self._last
        for block in self._blocks:
            block.keep()

    def _make_blocks(self, tensors: list[Tensor]) -> list[BufferBlock]:
        together: dict[torch.device, list[Tensor]] = {}
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        makers = {device: self._fused_for(device) for device in {tensor.device for tensor in tensors}}
        for tensor in tensors:
            if makers[tensor.device] is not None and tensor.is_contiguous():
                together.setdefault(tensor.device, []).append(tensor)
            else:
                alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        fused = [maker(own) for device, own in together.items() if (maker := makers[device]) is not None]
        return [*fused, *map(TorchBufferBlock, alike.values())]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The buffers that are kept."""
        return tuple(tensor for block in self._blocks for tensor in block.tensors)

    def _is_as_before(self) -> bool:
        """Whether the modules that are kept have the tensors of the last step, and no others."""
        slots = self._last
        num = sum(len(module._buffers) for module in self._moving)
        return num == len(slots) and all(slot.module._buffers.get(slot.name) is slot.tensor for slot in slots)

    @torch.no_grad()
    def settle(self, applied: Tensor) -> None:
        """A step is over: what it changed stays where it was applied, and goes back where it was not."""
        slots, self._slots = self._slots, None
        if not slots:
            return
        if self._looks:
            kept = self._kept_values()
            changed = {id(slot.module) for slot in slots if _is_changed(slot, kept)}
            self._moving = [module for module in self.holders if id(module) in changed or _tracks(module)]
        if not self._moving or (applied.device.type == "cpu" and bool(applied)):
            return
        replaced = [slot for slot in slots if slot.module._buffers.get(slot.name) is not slot.tensor]
        kept = self._kept_values() if replaced else {}
        for slot in replaced:
            _put_back(slot, None if slot.tensor is None else kept[id(slot.tensor)], applied)
        for block in self._blocks:
            block.settle(applied)

    def _kept_values(self) -> dict[int, Tensor]:
        """What each tensor held when the step began."""
        return {id(t): part for b in self._blocks for t, part in zip(b.tensors, b.kept, strict=True)}

    def undo(self) -> None:
        """A step raised: what it changed goes back."""
        if self._slots is not None:
            self.settle(torch.zeros((), dtype=torch.bool, device="cpu"))

    def forget(self) -> None:
        """What was kept is of no use: the buffers have been loaded."""
        self._slots = None

    def remove(self) -> None:
        """Watch the model no longer."""
        if self._hook is not None:
            self._hook.remove()


def _split(room: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Parts of a vector, each as large and in the shape of a tensor."""
    ends = [*itertools.accumulate(tensor.numel() for tensor in tensors)]
    return [room[end - t.numel() : end].view_as(t) for end, t in zip(ends, tensors, strict=True)]


def _put_back(slot: _BufferSlot, before: Tensor | None, applied: Tensor) -> None:
    """Of a buffer that was replaced by another tensor."""
    now = slot.now
    if now is not None and before is not None and (now.shape, now.dtype) == (before.shape, before.dtype):
        slot.module._buffers[slot.name] = torch.where(send(applied, now.device), now, send(before, now.device))
    elif not bool(applied):  # nothing can be selected from: the host has to know
        slot.module._buffers[slot.name] = slot.tensor


def _tracks(module: nn.Module) -> bool:
    """Whether a norm keeps running statistics, also where this step did not come to it."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def _is_changed(slot: _BufferSlot, kept: dict[int, Tensor]) -> bool:
    """Whether a buffer has other bits than before; waits for the device. Version counters miss running statistics."""
    if slot.now is not slot.tensor or slot.tensor is None:
        return slot.now is not slot.tensor
    return not torch.equal(_bits(slot.tensor), _bits(kept[id(slot.tensor)]))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
