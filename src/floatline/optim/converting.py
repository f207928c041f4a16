"""Converting: an optimizer of torch's, or of ours, as one that updates 16-bit weights in another way."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from floatline.errors import OptimizerError
from floatline.optim.algorithms import SGD, Adam, AdamW, Lion
from floatline.optim.optimizer import Optimizer, share_hooks
from floatline.optim.rules import UpdateName

_KINDS: dict[type, type[Optimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
    AdamW: AdamW,
    Adam: Adam,
    SGD: SGD,
    Lion: Lion,
}
# Settings of torch.optim's groups that say how to compute, not what.
_HOW = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


def convert(optimizer: torch.optim.Optimizer, *, update: UpdateName) -> Optimizer:
    """The same optimizer, of the same kind, groups and hyperparameters, with another update of 16-bit weights.

    The given one is not changed, and should not be used any more. Hooks of its steps listen to the new one.

    Numerics:
        The arithmetic is the given one's, in float32; see `Optimizer` for what becomes of a 16-bit weight. States are
        carried over. Checked by tests/optim/test_converting.py.

    Args:
        optimizer: torch.optim's AdamW, Adam or SGD, or one of floatline.optim.
        update: "exact", "stochastic", "kahan" or "nearest".
    """
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        raise OptimizerError(
            f"{type(optimizer).__name__} has no counterpart with update={update!r}. "
            "Use AdamW, Adam, SGD or floatline.optim.Lion, or FP32 weights."
        )
    if type(optimizer) is torch.optim.Adam and optimizer.param_groups[0].get("decoupled_weight_decay"):
        kind = AdamW
    known = set(inspect.signature(kind).parameters)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        if group.get("amsgrad"):
            raise OptimizerError(f"{kind.__name__} with amsgrad has no counterpart here. Use FP32 weights.")
        groups.append({k: v for k, v in group.items() if k not in _HOW and k != "amsgrad"})
    own = {name: getattr(optimizer, name) for name in ("states", "seed") if isinstance(optimizer, Optimizer)}
    defaults = {k: v for k, v in optimizer.defaults.items() if k in known and k not in _HOW and k != "amsgrad"}
    made: Any = kind
    new: Optimizer = made(groups, **defaults, **own, update=update)
    if optimizer.state:
        new.load_state_dict(optimizer.state_dict())
    share_hooks(optimizer, new)
    return new
