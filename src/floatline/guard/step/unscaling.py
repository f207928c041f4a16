"""Gradients divided by the scale and checked for inf and NaN, in every dtype, without losing small ones."""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from floatline import optim
from floatline.errors import ScalerError
from floatline.numerics import foreach
from floatline.numerics.moving import send
from floatline.optim.mesh import local_part

# Elements of BF16 gradients that are held in float32 at a time: 64 MiB.
_CHUNK = 1 << 24


@torch.no_grad()
def widen_fp16(optimizer: torch.optim.Optimizer) -> None:
    """Replace FP16 gradients by float32 ones, or refuse: FP16 cannot hold them once they are unscaled.

    Numerics:
        FP16 ends at 6e-08; a gradient of 1 divided by a scale of 2^24 is 6e-08 already. In float32 every FP16
        number divided by a power of two up to 2^24 is exact. Checked by tests/guard/step/test_unscaling.py.

    Args:
        optimizer: Its gradients are replaced if it is one of `floatline.optim`, which takes float32 gradients for
            FP16 weights, and if this torch lets a gradient differ from its parameter (`Tensor.grad_dtype`).

    Raises:
        ScalerError: There are FP16 gradients, and they cannot be replaced. No gradient was changed.
    """
    narrow = [param for param in _params(optimizer) if param.grad is not None and param.grad.dtype == torch.float16]
    if not narrow:
        return
    if not isinstance(optimizer, optim.Optimizer) or not hasattr(torch.Tensor, "grad_dtype"):
        raise ScalerError(
            "Attempting to unscale FP16 gradients. Divided by the scale, small ones are 0 in FP16. Use an optimizer "
            "of floatline.optim and scaler.step(optimizer, clip_norm=1.0) without unscale_, which unscales and "
            "clips in float32, or keep trained parameters in float32."
        )
    for param in narrow:
        grad = cast(Tensor, param.grad).float()
        param.grad_dtype = None
        param.grad = grad


@torch.no_grad()
def unscale(
    optimizer: torch.optim.Optimizer, *, inverse: Tensor, zero: Tensor, keep: bool
) -> dict[torch.device, Tensor]:
    """Multiply every gradient by the inverse scale in place, and say for each device whether one is not finite.

    Numerics:
        Multiplied in float32 (float64 for float64 gradients) and rounded once to the gradient's dtype, as
        torch.amp.GradScaler does on a CPU; on a GPU torch has no such kernel for BF16, and this takes float32 copies
        instead, 16 million elements at a time. Finiteness is that of the gradients before the multiplication.
        Checked by tests/guard/step/test_unscaling.py.

    Args:
        optimizer: Whose gradients.
        inverse: 1 / scale, on any device.
        zero: 0.0, on the scale's device; the flags begin as copies of it.
        keep: Check only; the gradients stay as they are. `inverse` must be 1 then.

    Returns:
        For each device that holds gradients: 1.0 if any of them is inf or NaN, else 0.0. Sharded gradients are
        looked at where they lie; agreeing is up to the caller.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in _params(optimizer):
        if param.grad is not None:
            values = _values(param)
            kinds.setdefault((values.device, values.dtype), []).append(values)
    found: dict[torch.device, Tensor] = {}
    inverses: dict[torch.device, Tensor] = {}
    for (device, dtype), grads in kinds.items():
        if device not in found:
            found[device] = send(zero, device) if zero.device != device else zero.clone()
            inverses[device] = send(inverse, device)
        if dtype != torch.bfloat16:
            foreach.check_and_unscale_(grads, found[device], inverses[device])
            continue
        for part in _chunks(grads):
            wide = [grad.float() for grad in part]
            foreach.check_and_unscale_(wide, found[device], inverses[device])
            if not keep:
                foreach.copy_(part, wide)
    return found


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _values(param: Tensor) -> Tensor:
    """The numbers of a gradient, as a plain dense tensor that shares its memory."""
    grad = cast(Tensor, param.grad)
    if not grad.is_sparse:
        values = local_part(grad)
        return torch.view_as_real(values) if values.is_complex() else values
    if grad.dtype == torch.float16 and not grad.is_coalesced():
        # Entries of one index are added up later, in FP16 too: an overflow must be seen now.
        grad = param.grad = grad.coalesce()
    return grad._values()


def _chunks(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of at most _CHUNK elements; a larger tensor comes in slices if its memory allows a flat view."""
    part: list[Tensor] = []
    room = _CHUNK
    for grad in grads:
        large = grad.numel() > _CHUNK and grad.is_contiguous()
        for piece in torch.split(grad.view(-1), _CHUNK) if large else (grad,):
            if part and piece.numel() > room:
                yield part
                part, room = [], _CHUNK
            part.append(piece)
            room -= piece.numel()
    if part:
        yield part
