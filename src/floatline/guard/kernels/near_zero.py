"""Near-zero counts on a GPU: one launch for all gradients of a dtype."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton.language as tl
from torch import Tensor

from floatline.guard.kernels import near_zero_kernel
from floatline.guard.step.layers import keep_made_in_fp16, thresholds

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_KERNEL = cast("Any", near_zero_kernel).count_kernel


class NearZeroCounts:
    """Counts like `count_near_zero`, and remembers how gradients of these sizes are cut into spans."""

    def __init__(self) -> None:
        self._spans: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, grads: list[Tensor], *, smallest: float) -> Tensor:
        """Zeros, ones and low of each gradient; see `count_near_zero`."""
        device = grads[0].device
        counts = torch.zeros(len(grads), 4, dtype=torch.int32, device=device)
        dtypes = {grad.dtype for grad in grads}
        for dtype in dtypes:
            own = [i for i, grad in enumerate(grads) if grad.dtype == dtype and grad.numel()]
            if not own:
                continue
            flat = [grads[i] if grads[i].is_contiguous() else grads[i].contiguous() for i in own]
            sizes, tensors, offsets = self._cut(tuple(grad.numel() for grad in flat), device)
            pinned = torch.tensor(
                [grad.data_ptr() for grad in flat], dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
            )
            found = counts if len(dtypes) == 1 and len(own) == len(grads) else torch.zeros_like(counts[: len(own)])
            _KERNEL[(len(tensors),)](
                pinned.to(device, non_blocking=True), sizes, tensors, offsets, found, *thresholds(smallest),
                GRAD_TYPE=_TYPES[dtype], SPAN=near_zero_kernel.SPAN, BLOCK=near_zero_kernel.BLOCK, num_warps=4,
            )  # fmt: skip
            if found is not counts:
                counts[torch.tensor(own, device="cpu").to(device, non_blocking=True)] = found
        return keep_made_in_fp16(counts.to(torch.int64))

    def _cut(self, sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Sizes; tensor and offset of each span."""
        if sizes not in self._spans:
            every = torch.tensor([-(-size // near_zero_kernel.SPAN) for size in sizes], device="cpu")
            tensors = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32, device="cpu"), every)
            firsts = torch.repeat_interleave(every.cumsum(0) - every, every)
            offsets = (torch.arange(len(tensors), device="cpu") - firsts) * near_zero_kernel.SPAN
            parts = (torch.tensor(sizes, dtype=torch.int64, device="cpu"), tensors, offsets)
            self._spans = {sizes: cast("tuple[Tensor, Tensor, Tensor]", tuple(part.to(device) for part in parts))}
        return self._spans[sizes]
