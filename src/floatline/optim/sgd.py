"""Gradient descent with momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from floatline.optim import rules
from floatline.optim.optimizer import Optimizer
from floatline.optim.rules import StatesName, UpdateName


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum or Nesterov's form of it, for 16- and 32-bit weights.

    Numerics:
        The arithmetic is torch.optim.SGD's, in its order, in float32. Checked by tests/optim/test_exact.py.
        Unlike torch's foreach implementation, nesterov leaves the gradients as they are.

    Args:
        params: Tensors, named tensors or parameter groups.
        lr: Learning rate; a float, or a tensor with one number.
        momentum: Share of the previous direction that is kept; 0 keeps no state.
        dampening: Share of the gradient that is left out of the momentum.
        weight_decay: Factor of the weight that is added to its gradient.
        nesterov: Look ahead along the momentum.
        maximize: Go up the gradient.
        foreach: Taken and ignored, so that torch's class can be replaced by name: there is one implementation.
        fused: Taken and ignored; a step is fused where the device can do it.
        capturable: Taken and ignored; on a GPU every step can be captured in a CUDA graph.
        differentiable: Not supported; True is refused.
        update: How a 16-bit weight takes its update: "exact", "stochastic", "kahan" or "nearest".
        states: How the momentum is stored: "fp32", "bf16" or "int8".
        seed: Key of random choices.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,  # noqa: ARG002
        fused: bool | None = None,  # noqa: ARG002
        capturable: bool = False,  # noqa: ARG002
        differentiable: bool = False,
        update: UpdateName = "exact",
        states: StatesName = "fp32",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        if differentiable:
            defaults["differentiable"] = differentiable
        super().__init__(params, defaults, rule=rules.SGD, update=update, states=states, seed=seed)
