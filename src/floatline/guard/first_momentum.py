"""torch's fused SGD leaves its momentum uninitialised where the first step is skipped: it is given zeros before."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def prepare_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give weights that have no momentum yet a momentum of 0, which the first step turns into their gradient.

    torch makes the momentum of a first step with `empty_like`, and a fused kernel that is told to skip the step does
    not write to it: from the second step on the weights are moved by what was in memory before.

    Numerics:
        0 x momentum + gradient is the gradient, as in torch's first step; a gradient of -0.0 becomes 0.0, which moves
        a weight by as much. With dampening torch's first step is another one: such an optimizer is not changed here,
        see `is_prepared`. Checked by tests/guard/test_first_momentum.py.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    state = cast("dict[Tensor, dict[str, Any]]", optimizer.state)
    for group in optimizer.param_groups:
        if not (group.get("fused") and group["momentum"]) or group["dampening"]:
            continue
        for param in group["params"]:
            if param.grad is not None and state.get(param, {}).get("momentum_buffer") is None:
                state[param]["momentum_buffer"] = torch.zeros_like(param.grad)


def is_prepared(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `prepare_momentum` can do it: not for a fused SGD with momentum and dampening."""
    groups = optimizer.param_groups if type(optimizer) is torch.optim.SGD else []
    return not any(group.get("fused") and group["momentum"] and group["dampening"] for group in groups)
