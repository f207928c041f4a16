"""send: a tensor on another device, as soon as its numbers are there."""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device, without waiting for it, but for the CPU.

    Numerics:
        torch copies from a GPU into pinned memory and, told not to wait, returns before the numbers are there: what the
        CPU then reads is anything. Checked by tests/guard/step/test_unscaling.py.
    """
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")
