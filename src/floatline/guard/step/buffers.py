"""A model's buffers in a step that may be skipped: kept when it begins, put back on the device where it was skipped."""

# torch shows a module's own buffers under private names only.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from floatline.guard.step.buffer_blocks import BufferBlock, is_plain, make_blocks
from floatline.numerics.moving import send
from floatline.precision.wrappers import unwrap

# Mapped over modules and buffers: the interpreter's own share of a pass over hundreds is what it would cost otherwise.
_training, _own_buffers, _version = attrgetter("training"), attrgetter("_buffers"), attrgetter("_version")
_values = cast("Callable[[dict[str, Tensor | None]], Iterable[Tensor | None]]", dict.values)


_STEPS = threading.local()  # now: whose step a guard has begun in this thread

FusedFor = Callable[[torch.device], Callable[[list[Tensor]], BufferBlock] | None]


@dataclass(slots=True, eq=False)
class _BufferSlot:
    """A module's buffer as it was when the step began."""

    module: nn.Module
    name: str
    tensor: Tensor | None

    @property
    def now(self) -> Tensor | None:
        return self.module._buffers.get(self.name)


class _Holding:
    """The buffers that some modules have, and whether these still have them: a few passes in C over hundreds."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.slots = [_BufferSlot(module, name, b) for module in modules for name, b in module._buffers.items()]
        self._tensors = [slot.tensor for slot in self.slots]
        self.tensors = list({id(t): t for t in self._tensors if t is not None}.values())
        self._counted = [t for t in self.tensors if not t.is_inference()]  # the others have no version
        self._versions = list(map(_version, self._counted))

    def is_same(self) -> bool:
        """Whether the modules have the same tensors, and no others."""
        held: list[dict[str, Tensor | None]] = list(map(_own_buffers, self.modules))
        if sum(map(len, held)) != len(self._tensors):
            return False
        # Equality would do it in less time, and ask tensors whether they are equal: that is an operation on the device.
        return all(map(is_, itertools.chain.from_iterable(map(_values, held)), self._tensors))

    def again(self) -> _Holding:
        """What the modules have now, as it is written now."""
        if not self.is_same():
            return _Holding(self.modules)
        self._versions = list(map(_version, self._counted))
        return self

    def written(self) -> list[nn.Module]:
        """Modules whose buffers were written since, as far as torch counts that, or exchanged."""
        now = list(map(_version, self._counted))
        if now == self._versions and self.is_same():
            return []
        touched = {id(t) for t, old, new in zip(self._counted, self._versions, now, strict=True) if old != new}
        found = {s.module for s in self.slots if s.now is not s.tensor or id(s.tensor) in touched}
        found |= {module for module, _ in self.new()}
        return [module for module in self.modules if module in found]

    def new(self) -> list[tuple[nn.Module, str]]:
        """Buffers that the modules have made since."""
        known = {(slot.module, slot.name) for slot in self.slots}
        return [(m, name) for m in self.modules for name in m._buffers if (m, name) not in known]


class _Keeping:
    """Buffers as they were when a step began, in blocks."""

    def __init__(self, modules: list[nn.Module], *, fused_for: FusedFor) -> None:
        self.holding = _Holding(modules)
        self.blocks = make_blocks(self.holding.tensors, fused_for=fused_for)

    def keep(self) -> None:
        """A step begins."""
        for block in self.blocks:
            block.keep()

    def fits(self) -> bool:
        """Whether the blocks can keep what the modules have now."""
        return self.holding.is_same() and not self.find_misfits()

    def find_misfits(self) -> list[Tensor]:
        """Buffers that no block puts back."""
        return [tensor for block in self.blocks for tensor in block.misfits()]

    def values(self) -> dict[int, Tensor]:
        """What each tensor held when the step began."""
        return {id(t): part for b in self.blocks for t, part in zip(b.tensors, b.kept, strict=True)}

    def settle(self, applied: Tensor) -> None:
        """What was kept goes back unless the step was applied."""
        misfits = self.find_misfits()
        if misfits and bool(applied):  # nothing can be selected from: the host has to know
            return
        if misfits or not self.holding.is_same():
            self._put_back(applied, misfits)
        for block in self.blocks:
            block.settle(applied)

    @torch.no_grad()
    def _put_back(self, applied: Tensor, misfits: list[Tensor]) -> None:
        """Tensors that stand where others stood, or where nothing was, or that no block puts back.

        Args:
            applied: Whether the step was; it was not, where there are misfits.
            misfits: Tensors that no block puts back.
        """
        kept = self.values()
        for tensor in filter(is_plain, misfits):
            tensor.data = kept[id(tensor)].clone()
        others = {id(tensor) for tensor in misfits if not is_plain(tensor)}
        for slot in self.holding.slots:
            if id(slot.tensor) in others:
                slot.module._buffers[slot.name] = kept[id(slot.tensor)]
            elif slot.now is not slot.tensor:
                _put_back(slot, kept.get(id(slot.tensor)), applied)
        new = self.holding.new()
        if new and not bool(applied):
            for module, name in new:
                delattr(module, name)
        self.find_misfits()  # the blocks see where their buffers lie now


def _host() -> Buffers | None:
    """Those of the guard whose step is under way in this thread."""
    ref = getattr(_STEPS, "now", None)
    return None if ref is None else ref()


def _no_fused(device: torch.device) -> None:
    """No device has a faster block."""
    del device


class Buffers:
    """Keeps what a step may change of a model's buffers, and puts it back on the device where the step is skipped.

    A step begins with the guard's, or with the first forward pass in training after the last step. In the first step,
    and in the first after modules have been switched between training and evaluation, all buffers are kept, and the
    host reads which of them were changed: from then on these are kept, and those that lie in the same modules. The
    same is done in the step after one that wrote to others. Nothing is copied, and nothing launched, for modules whose
    buffers no step changes; the host waits for nothing, unless a buffer is new, or replaced by one of another shape.
    Where the step runs through the model of another guard, as a generator's through its discriminator, what it changes
    there is settled with it.

    Numerics:
        Selected, never multiplied: what was kept comes back with every bit, NaN included; what is not put back stays
        as it is. Checked by tests/guard/step/test_buffers.py.

    Attributes:
        holders: Modules with buffers.
        needed: Whether there is anything to keep or to settle; until the first step is over it is not known.

    Args:
        model: Plain, or wrapped. Its forward pass tells when a step begins.
        fused_for: Gives what makes a block of contiguous buffers of any dtypes in few launches; None for devices
            without.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fused_for: FusedFor = _no_fused,
    ) -> None:
        self._fused_for = fused_for
        self._model = model
        self.holders = self._find_holders()
        self.needed = True
        self._moving: list[nn.Module] = []
        self._idle = _Holding([])  # what the others have, where writing to it means anything
        self._suspects: list[nn.Module] = []  # the last step wrote to these, and they are not kept
        self._noisy: set[nn.Module] = set()  # written in every step, as they were: DDP sends masks to all processes
        self._modes: list[bool] = []
        self._looks = False  # all buffers are kept, to see which of them change
        self._kept = _Keeping([], fused_for=fused_for)
        self._begun = False
        self._guests: list[Buffers] = []  # of other guards' models, whose forward passes were part of this step
        self._hook = model.register_forward_pre_hook(self._begin) if self.holders else None

    def _find_holders(self) -> list[nn.Module]:
        modules = cast("Iterable[nn.Module]", unwrap(self._model).modules())
        return [module for module in modules if module._buffers]

    def _begin(self, module: nn.Module, args: Any) -> None:
        del args
        if not self._begun and module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._keep(again=False)
            host = _host()
            if host is not None and host is not self and self not in host._guests:
                host._guests.append(self)

    def keep(self, *, again: bool = False) -> None:
        """A step begins; where that is known already, nothing happens, unless it begins again."""
        _STEPS.now = weakref.ref(self)
        self._keep(again=again)

    def _keep(self, *, again: bool) -> None:
        if (self._begun and not again) or not self.needed:
            return
        self._begun = False  # what is half kept is not put back
        if not self._modes:  # the first time
            self.holders = self._find_holders()
        modes = list(map(_training, self.holders))
        looked, self._looks, self._modes = self._looks, modes != self._modes or bool(self._suspects), modes
        if self._looks or looked or not self._kept.fits():
            self._kept = _Keeping(self.holders if self._looks else self._moving, fused_for=self._fused_for)
        self._kept.keep()
        self._idle = self._idle.again()
        self._begun = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The buffers that are kept."""
        return tuple(tensor for block in self._kept.blocks for tensor in block.tensors)

    def settle(self, applied: Tensor) -> None:
        """A step is over: what it changed stays where it was applied, and goes back where it was not."""
        if _host() is self:
            _STEPS.now = None
        guests, self._guests = self._guests, []
        for guest in guests:
            if guest._begun:  # else its own step has come since
                guest.settle(applied)
        if not self.needed:
            return
        begun, self._begun = self._begun, False
        if begun and self._looks:
            self._learn_who_moves()
        elif begun:
            self._suspects = self._idle.written()
        if self._looks or not self.holders:
            self._take_new_holders(applied if begun else None)
        self.needed = bool(self.holders)
        if not begun or not self._moving or (applied.device.type == "cpu" and bool(applied)):
            return
        self._kept.settle(applied)

    def _learn_who_moves(self) -> None:
        """All buffers were kept: see which of them the step has changed; waits for the device."""
        kept, misfits = self._kept.values(), {id(tensor) for tensor in self._kept.find_misfits()}
        holding = self._kept.holding
        changed = {s.module for s in holding.slots if id(s.tensor) in misfits or _is_changed(s, kept)}
        changed |= {module for module, _ in holding.new()}
        written = set(holding.written())
        self._noisy |= {module for module in self._suspects if module in written - changed}
        # A block that is left out at random moves in some steps only: what has moved in training is kept from then on.
        changed |= {module for module in (*self._moving, *self._suspects) if module.training} - self._noisy
        self._moving = [module for module in self.holders if module in changed or _tracks(module)]
        quiet = self._noisy.union(self._moving)
        self._idle = _Holding([module for module in self.holders if module not in quiet])
        self._suspects = []

    def _take_new_holders(self, applied: Tensor | None) -> None:
        """Modules that have made their first buffer in this step: it is gone where the step was skipped.

        Args:
            applied: None where nobody has seen the step begin: the buffer may be older.
        """
        known = set(self.holders)
        new = [module for module in self._find_holders() if module not in known]
        if not new:
            return
        if applied is not None and not bool(applied):
            for module in new:
                for name in list(module._buffers):
                    delattr(module, name)
            return
        self.holders = self._find_holders()
        self._hook = self._hook or self._model.register_forward_pre_hook(self._begin)

    def undo(self) -> None:
        """A step raised: what it changed goes back."""
        if self._begun or self._guests:
            self.settle(torch.zeros((), dtype=torch.bool, device="cpu"))

    def forget(self) -> None:
        """What was kept is of no use: the buffers have been loaded."""
        self._begun = False

    def remove(self) -> None:
        """Watch the model no longer."""
        if self._hook is not None:
            self._hook.remove()


@contextlib.contextmanager
def untouched(model: nn.Module) -> Generator[None]:
    """Run something that leaves a model's buffers as they are, whatever its forward passes write to them.

    Args:
        model: Plain, or wrapped.
    """
    kept = _Keeping(list(unwrap(model).modules()), fused_for=_no_fused)
    kept.keep()
    try:
        yield
    finally:
        kept.settle(torch.zeros((), dtype=torch.bool, device="cpu"))


def _put_back(slot: _BufferSlot, before: Tensor | None, applied: Tensor) -> None:
    """Of a buffer that was replaced by another tensor."""
    now = slot.now
    if now is not None and before is not None and _are_alike(now, before):
        slot.module._buffers[slot.name] = torch.where(send(applied, now.device), now, send(before, now.device))
    elif not bool(applied):  # nothing can be selected from: the host has to know
        slot.module._buffers[slot.name] = slot.tensor


def _are_alike(one: Tensor, two: Tensor) -> bool:
    return is_plain(one) and is_plain(two) and (one.shape, one.dtype) == (two.shape, two.dtype)


def _tracks(module: nn.Module) -> bool:
    """Whether a norm keeps running statistics, also where this step did not come to it."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def _is_changed(slot: _BufferSlot, kept: dict[int, Tensor]) -> bool:
    """Whether a buffer has other bits than before; waits for the device. Version counters miss running statistics."""
    before = kept.get(id(slot.tensor))
    if slot.now is not slot.tensor or slot.tensor is None or before is None:
        return slot.now is not slot.tensor
    return is_plain(slot.tensor) and not torch.equal(_bits(slot.tensor), _bits(before))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
