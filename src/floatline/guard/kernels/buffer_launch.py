"""Buffers on a GPU: one launch keeps all of them, whatever their dtypes, and one puts them back."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton.language as tl
from torch import Tensor

from floatline.guard.kernels import buffer_kernel
from floatline.guard.step.buffer_blocks import find_misfits
from floatline.numerics.moving import send
from floatline.optim.kernels.launches import Launches, kind_of

_KERNEL = cast("Any", buffer_kernel).move_kernel
_ALIGNED = 16  # bytes, between one kept buffer and the next


class FusedBufferBlock:
    """Contiguous buffers of one device as bytes; see `BufferBlock`.

    Numerics:
        Bits are copied, or left alone: NaN, negative zeros and every integer come back as they were. Checked by
        tests/guard/step/test_buffer_kernel.py.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
        room = torch.empty(starts[-1], dtype=torch.uint8, device=tensors[0].device)
        self.kept = [
            room[start : start + size].view(tensor.dtype).view(tensor.shape)
            for start, size, tensor in zip(starts, sizes, tensors, strict=False)
        ]
        self._sizes = sizes
        self._take(list(map(Tensor.data_ptr, tensors)))

    def keep(self) -> None:
        """A step begins."""
        self._move(self._table, keeps=True)

    def misfits(self) -> list[Tensor]:
        """Buffers that have got another shape or dtype, or are no longer contiguous."""
        addresses = list(map(Tensor.data_ptr, self.tensors))
        if addresses == self._addresses:
            return []
        # A tensor was given other memory: `buffer.data = …`.
        found = find_misfits(self.tensors, self.kept) or [t for t in self.tensors if not t.is_contiguous()]
        if not found:
            self._take(addresses)
        return found

    def settle(self, applied: Tensor) -> None:
        """What was kept goes back unless the step was applied."""
        self._move(send(applied, self._table.device), keeps=False)

    def _move(self, applied: Tensor, *, keeps: bool) -> None:
        if self._num_spans:
            # Keeping looks at no decision, and takes whatever tensor there is.
            key = (keeps, *kind_of(applied))
            tensors, constants = (self._table, applied), self._constants[keeps]
            self._launches(_KERNEL, self._num_spans, tensors, constants, key=key, num_warps=4)

    def _take(self, addresses: list[int]) -> None:
        """These tensors from here on, and launches of their own."""
        word, self._table = self._make_table(addresses)
        self._addresses, self._num_spans, self._launches = addresses, len(self._table), Launches()
        same = {"WORD": word, "BLOCK": buffer_kernel.BLOCK}
        self._constants: dict[bool, dict[str, Any]] = {keeps: {"KEEPS": keeps, **same} for keeps in (True, False)}

    def _make_table(self, addresses: list[int]) -> tuple[Any, Tensor]:
        """The word that all buffers consist of, and live address, kept address and number of words of each span."""
        bytes_each = 4 if all(number % 4 == 0 for number in (*addresses, *self._sizes)) else 1
        span = buffer_kernel.BLOCK * bytes_each
        rows = [
            (live + first, kept.data_ptr() + first, min(span, size - first) // bytes_each)
            for live, kept, size in zip(addresses, self.kept, self._sizes, strict=True)
            for first in range(0, size, span)
        ]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 3)
        return tl.uint32 if bytes_each == 4 else tl.uint8, table.to(self.kept[0].device)
