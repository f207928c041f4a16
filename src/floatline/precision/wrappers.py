"""Models wrapped by DDP, FSDP2 or torch.compile: the model itself, and what FSDP2 keeps between two passes."""

from __future__ import annotations

from typing import Any, cast

from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself: DDP and torch.compile put a word in front of every name."""
    own: Any = model
    while True:
        inner = getattr(own, "module", None) if hasattr(own, "no_sync") else getattr(own, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return own
        own = inner


def reshard(model: nn.Module) -> None:
    """Let FSDP2 show its parameters as parts: after a forward pass without a backward pass some are still whole."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync") and hasattr(module, "reshard"):
            cast(Any, module).reshard()


def drop_gradients(model: nn.Module) -> None:
    """Forget gradients that FSDP2 holds back between micro-batches: zero_grad does not reach them."""
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state = cast(Any, module)._get_fsdp_state()
        # Older torch has one group, or None, for each module.
        groups = getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
        for part in (part for group in groups if group is not None for part in group.fsdp_params):
            part.unsharded_accumulated_grad = None
            if hasattr(part, "_unsharded_param"):
                part._unsharded_param.grad = None
