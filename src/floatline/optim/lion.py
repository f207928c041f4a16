"""Lion: steps of one size, in the direction of the momentum's sign."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from floatline.optim import rules
from floatline.optim.optimizer import Optimizer
from floatline.optim.rules import StatesName, UpdateName


class Lion(Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675) for 16- and 32-bit weights; one state instead of Adam's two.

    Numerics:
        w ← w·(1 - lr·weight_decay) - lr·sign(β1·m + (1 - β1)·g), then m ← β2·m + (1 - β2)·g; float32.
        Checked by tests/optim/test_exact.py against these two lines.

    Args:
        params: Tensors, named tensors or parameter groups.
        lr: Size of a step; a third to a tenth of what AdamW would take.
        betas: Share of the momentum in the direction, and decay of the momentum.
        weight_decay: Share of lr by which weights shrink each step.
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
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
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
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        if differentiable:
            defaults["differentiable"] = differentiable
        super().__init__(params, defaults, rule=rules.LION, update=update, states=states, seed=seed)
