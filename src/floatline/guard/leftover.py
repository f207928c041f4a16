"""A loss that is still divided by the number of micro-batches, which the guard averages over itself."""

# torch shows this switch to Python under a private name only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PASSES_ON = ("ViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0", "SqueezeBackward0", "UnsafeViewBackward0")


def find_divisor(loss: Tensor) -> float:
    """What a loss was divided by, or multiplied by the reciprocal of, last of all; 1.0 where it was not.

    It is read from the graph of the loss; nothing waits for a device.
    """
    node: Any = loss.grad_fn
    for _ in _PASSES_ON:
        if node is not None and node.name() in _PASSES_ON:
            node = node.next_functions[0][0]
    if node is None:
        return 1.0
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or other.device.type != "cpu":
        return 1.0
    with torch._C._DisableTorchDispatch():  # a number of the code is no tensor to dispatch modes such as HalfOnCPU
        value = float(other)
    if node.name() == "DivBackward0":
        return value
    return 1.0 / value if node.name() == "MulBackward0" and value else 1.0
