"""Samples of tensors, taken in place, and a digest of weights by which processes can be told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from floatline.optim.mesh import local_part

# Elements of a tensor that are looked at: all of a small one, and of a large one so many.
MOST = 2**16


def sample(tensor: Tensor) -> Tensor:
    """Elements of this process's part of a tensor, evenly spread; a view where the tensor is contiguous.

    Numerics:
        Every element up to 2**16 of them. Of more, every k-th with k odd, so that a row whose length is a power of two
        is not met at the same columns again and again. Checked by tests/probe/scripts/test_weight_digest.py.
    """
    flat = local_part(tensor).detach().reshape(-1)
    step = -(-flat.numel() // MOST)
    return flat if step <= 1 else flat[:: step | 1]


def is_measured(parameter: Tensor) -> bool:
    """Whether a tensor has numbers to be looked at."""
    return parameter.is_floating_point() and not parameter.is_meta and parameter.numel() > 0


def digest_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of samples of weights and their names, in their order; those aside that processes hold parts of."""
    found = hashlib.sha256()
    with torch.no_grad():
        for name, tensor in weights:
            if is_measured(tensor) and not is_part(tensor):
                found.update(f"{name} {tuple(tensor.shape)}".encode())
                found.update(sample(tensor).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def is_part(tensor: Tensor) -> bool:
    """Whether a process holds a part of a tensor, or of many in a row, as FSDP's first version does.

    Megatron's and DeepSpeed's parts are plain tensors, which are marked: those of tensor parallelism, and experts.
    """
    if local_part(tensor) is not tensor or type(tensor).__name__ == "FlatParameter":
        return True
    return bool(getattr(tensor, "tensor_model_parallel", False)) or getattr(tensor, "allreduce", True) is False
