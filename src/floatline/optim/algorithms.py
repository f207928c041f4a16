"""AdamW, Adam, Lion and SGD, and an optimizer of torch's, or of ours, converted to one of them or to Muon."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from floatline.errors import OptimizerError
from floatline.optim import rules
from floatline.optim.muon import Muon
from floatline.optim.optimizer import Optimizer, share_hooks
from floatline.optim.rules import StatesName, UpdateName


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101) for 16- and 32-bit weights.

    Numerics:
        The arithmetic is torch.optim.AdamW's, in its order, in float32: on a CPU the trained float32 numbers are
        bit for bit those of torch's foreach implementation on float32 weights. Checked by tests/optim/test_exact.py.

    Args:
        params: Tensors, named tensors or parameter groups.
        lr: Learning rate; a float, or a tensor with one number.
        betas: Decay of the two moments.
        eps: Added to the denominator.
        weight_decay: Share of lr by which weights shrink each step.
        amsgrad: Not supported; True is refused.
        maximize: Go up the gradient.
        foreach: Taken and ignored, so that torch's class can be replaced by name: there is one implementation.
        fused: Taken and ignored; a step is fused where the device can do it.
        capturable: Taken and ignored; on a GPU every step can be captured in a CUDA graph.
        differentiable: Not supported; True is refused.
        update: How a 16-bit weight takes its update: "exact", "stochastic", "kahan" or "nearest".
        states: How moments are stored: "fp32", "bf16" or "int8".
        seed: Key of random choices.

    Example:
        >>> model = torch.nn.Linear(8, 8).to(torch.bfloat16)
        >>> optimizer = floatline.optim.AdamW(model.parameters(), lr=1e-3)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        if amsgrad:
            defaults["amsgrad"] = amsgrad
        if differentiable:
            defaults["differentiable"] = differentiable
        super().__init__(params, defaults, rule=rules.ADAMW, update=update, states=states, seed=seed)


class Adam(Optimizer):
    """Adam (Kingma and Ba 2014, arXiv:1412.6980), with weight decay as part of the gradient.

    Numerics:
        The arithmetic is torch.optim.Adam's, in its order, in float32. Checked by tests/optim/test_exact.py.

    Args:
        params: Tensors, named tensors or parameter groups.
        lr: Learning rate; a float, or a tensor with one number.
        betas: Decay of the two moments.
        eps: Added to the denominator.
        weight_decay: Factor of the weight that is added to its gradient.
        amsgrad: Not supported; True is refused.
        maximize: Go up the gradient.
        foreach: Taken and ignored, so that torch's class can be replaced by name: there is one implementation.
        fused: Taken and ignored; a step is fused where the device can do it.
        capturable: Taken and ignored; on a GPU every step can be captured in a CUDA graph.
        differentiable: Not supported; True is refused.
        decoupled_weight_decay: Weights shrink by themselves, as AdamW's do.
        update: How a 16-bit weight takes its update: "exact", "stochastic", "kahan" or "nearest".
        states: How moments are stored: "fp32", "bf16" or "int8".
        seed: Key of random choices.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,  # noqa: ARG002
        fused: bool | None = None,  # noqa: ARG002
        capturable: bool = False,  # noqa: ARG002
        differentiable: bool = False,
        decoupled_weight_decay: bool = False,
        update: UpdateName = "exact",
        states: StatesName = "fp32",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        if amsgrad:
            defaults["amsgrad"] = amsgrad
        if differentiable:
            defaults["differentiable"] = differentiable
        rule = rules.ADAMW if decoupled_weight_decay else rules.ADAM
        super().__init__(params, defaults, rule=rule, update=update, states=states, seed=seed)


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


_KINDS: dict[type, type[Optimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
    AdamW: AdamW,
    Adam: Adam,
    SGD: SGD,
    Lion: Lion,
    Muon: Muon,
}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
    _KINDS[torch.optim.Muon] = Muon
# Settings of torch.optim's groups that say how to compute, not what.
_HOW = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


def convert(optimizer: torch.optim.Optimizer, *, update: UpdateName, states: StatesName | None = None) -> Optimizer:
    """The same optimizer, of the same kind, groups and hyperparameters, with another update of 16-bit weights.

    The given one is not changed, and should not be used any more. Hooks of its steps listen to the new one.

    Numerics:
        The arithmetic is the given one's, in float32; see `Optimizer` for what becomes of a 16-bit weight. States are
        carried over. Checked by tests/optim/test_converting.py.

    Args:
        optimizer: torch.optim's AdamW, Adam, SGD or Muon, or one of floatline.optim.
        update: "exact", "stochastic", "kahan" or "nearest".
        states: How moments are stored: "fp32", "bf16" or "int8". None: as the given one stores them.
    """
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        raise OptimizerError(
            f"{type(optimizer).__name__} has no counterpart with update={update!r}. "
            "Use AdamW, Adam, SGD, Muon or floatline.optim.Lion, or FP32 weights."
        )
    if type(optimizer) is torch.optim.Adam and optimizer.param_groups[0].get("decoupled_weight_decay"):
        kind = AdamW
    known = set(inspect.signature(kind).parameters)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        if group.get("amsgrad"):
            raise OptimizerError(f"{kind.__name__} with amsgrad has no counterpart here. Use FP32 weights.")
        groups.append({k: v for k, v in group.items() if k not in _HOW and k != "amsgrad"})
    own = {name: getattr(optimizer, name) for name in ("states", "seed", "adamw") if hasattr(optimizer, name)}
    if states is not None:
        own["states"] = states
    defaults = {k: v for k, v in optimizer.defaults.items() if k in known and k not in _HOW and k != "amsgrad"}
    made: Any = kind
    new: Optimizer = made(groups, **defaults, **own, update=update)
    if optimizer.state:
        new.load_state_dict(optimizer.state_dict())
    share_hooks(optimizer, new)
    return new
