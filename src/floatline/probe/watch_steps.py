"""What is known when a model runs or an optimizer steps, for the full watch and the light one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from floatline.probe.aside import Aside
from floatline.probe.events import Made, Watch
from floatline.probe.gradient_scales import Held


def has_bad(*trees: Any) -> Tensor | bool:
    """Whether a tensor holds NaN or inf. -inf is how masks are written."""
    tensors = [t for t in tree_leaves(trees) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    with Aside():
        bad = [(tensor.isnan() | tensor.isposinf()).any() for tensor in tensors]
        return torch.stack([flag.to(bad[0].device) for flag in bad]).any() if bad else False


def open_region(seen: Watch) -> int:
    """Number of the outermost open autocast region that keeps weight copies; 0 where none is open."""
    enabled = any(enabled for _, enabled in seen.regions)
    return seen.regions[0][0] if enabled and torch.is_autocast_cache_enabled() else 0


def describe_step(seen: Watch, optimizer: Optimizer, made: Made, held: Held, largest: Any) -> dict[str, Any]:
    """What is known when an optimizer steps."""
    parameters = held.parameters
    return {
        "optimizer": made.number,
        "name": made.name,
        "through_scaler": seen.busy > 0,
        "scales_itself": bool(getattr(optimizer, "_step_supports_amp_scaling", False)),
        "factors": list(held.factors),
        "shrunk": held.shrunk,
        "num_parameters": len(parameters),
        "num_without_gradient": sum(parameter.grad is None for parameter in parameters),
        "largest": largest,
        "rates": [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
        "region": open_region(seen),
        "moved": None,
        "finite_after": True,
    }
