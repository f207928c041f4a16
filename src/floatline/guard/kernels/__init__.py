"""The judge, the count of lost gradients and kept buffers as Triton kernels, for devices that Triton knows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from floatline.guard.step.buffer_blocks import BufferBlock
from floatline.guard.step.judge import JudgeLaunch
from floatline.guard.step.layers import count_near_zero


def judge_for(device: torch.device) -> JudgeLaunch | None:
    """The judge in one launch; None where there is none for the device."""
    if not _is_known(device):
        return None
    from floatline.guard.kernels.judge_launch import FusedJudge

    return FusedJudge()


def counter_for(device: torch.device) -> Callable[..., Tensor]:
    """Counts lost gradients with one launch, or with torch operations where there is none for the device."""
    if not _is_known(device):
        return count_near_zero
    from floatline.guard.kernels.near_zero import NearZeroCounts

    return NearZeroCounts()


def fused_for(device: torch.device) -> Callable[[list[Tensor]], BufferBlock] | None:
    """What keeps and puts back buffers with one launch; None where there is none for the device."""
    if not _is_known(device):
        return None
    from floatline.guard.kernels.buffer_launch import FusedBufferBlock

    return FusedBufferBlock


def _is_known(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
