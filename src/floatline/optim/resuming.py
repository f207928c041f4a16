"""Resuming: optimizer states from here or from torch.optim, without a lossy cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from floatline.errors import OptimizerError
from floatline.optim import hyperparameters, mesh, storage
from floatline.optim.rules import RuledOptimizer
from floatline.optim.survey import BLOCK

# Settings of torch.optim's groups that say how to compute, not what.
_FLAGS = ("foreach", "fused", "capturable", "differentiable", "amsgrad", "decoupled_weight_decay")


def load_state(optimizer: RuledOptimizer, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """Load an optimizer's state; torch's own loading casts every float state to the weight's dtype.

    The states are made ready, and refused where they do not fit, before anything is changed. The hooks that users
    have registered run as in torch: ours come after their pre-hooks and before their post-hooks.

    Args:
        optimizer: Where to load to.
        state_dict: From here or from torch.optim.
        load: torch's own `load_state_dict` of this optimizer.
    """
    ready: dict[Tensor, dict[str, Tensor]] = {}

    def prepare(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        rest = dict(saved["state"])
        owners = [param for group in optimizer.param_groups for param in group["params"]]
        for group in saved["param_groups"]:
            hyperparameters.check_group({**optimizer.defaults, **group})
        if len(ids) == len(owners):  # else torch refuses it
            groups = [group for group in saved["param_groups"] for _ in group["params"]]
            for i, param, group in zip(ids, owners, groups, strict=True):
                if rest.get(i):
                    ready[param] = _adopt(optimizer, param, {**optimizer.defaults, **group}, rest[i])
                rest.pop(i, None)
        return {**saved, "state": rest}

    def install(_: torch.optim.Optimizer) -> None:
        optimizer.state.update(ready)
        for group in optimizer.param_groups:
            for flag in _FLAGS:
                group.pop(flag, None)
            for name, default in optimizer.defaults.items():
                group.setdefault(name, default)

    before = optimizer.register_load_state_dict_pre_hook(prepare)
    after = optimizer.register_load_state_dict_post_hook(install, prepend=True)
    try:
        load(state_dict)
    finally:
        before.remove()
        after.remove()


def _adopt(optimizer: RuledOptimizer, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Tensor]:
    """One parameter's saved state, in this optimizer's form."""
    weight = mesh.local_part(param.detach())
    _check_kind(optimizer, group, saved)
    names = [name for name in optimizer.rule.states_for(group) if saved.get(name) is not None]
    # torch's SGD counts no steps; where it has a momentum, it has made at least one.
    step = float(saved.get("step", 1.0 if names else 0.0))
    state = {"step": torch.tensor(step, dtype=torch.float32, device=weight.device)}
    for name in names:
        fresh = storage.new_state(weight, name, optimizer.states)
        value = _local_value(param, saved[name], name)
        scale = _local_scale(saved.get(f"{name}_scale"), value, name)
        if value.dtype == fresh[name].dtype:
            fresh[name].copy_(value)
            if scale is not None:
                fresh[f"{name}_scale"].copy_(scale)
        else:
            storage.write_state(fresh, name, storage.read_state(value, scale))
        state |= fresh
    extras = storage.new_extra(weight, optimizer.update)
    for key in storage.EXTRAS.values():
        if key not in saved:
            continue
        if key not in extras:
            written = next(update for update, extra in storage.EXTRAS.items() if extra == key)
            raise OptimizerError(
                f"The checkpoint was written with update={written!r} and 16-bit weights; this optimizer has "
                f"update={optimizer.update!r} and {weight.dtype} weights. Make it the same, or carry the weights over "
                "with master_state_dict and load_master."
            )
        value = _local_value(param, saved[key], key)
        extras[key].copy_(value.view(torch.int16) if key == "remainder" else value)
    return {key: mesh.like_param(param, key, tensor) for key, tensor in (state | extras).items()}


def _check_kind(optimizer: RuledOptimizer, group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse the moments of another kind of optimizer: a step counter without moments would make a huge first step."""
    needed = optimizer.rule.states_for(group)
    beside = ("step", *storage.EXTRAS.values())
    held = [name for name, value in saved.items() if value is not None and name not in beside]
    held = [name for name in held if not (name.endswith("_scale") and name.removesuffix("_scale") in held)]
    if held and any(name not in held for name in needed):
        kind = type(optimizer).__name__
        raise OptimizerError(
            f"The checkpoint holds {' and '.join(held)} for a weight, and {kind} needs {' and '.join(needed)}. "
            f"Load a checkpoint of {kind}, or begin without one."
        )


def _local_value(param: Tensor, value: Any, name: str) -> Tensor:
    """This process's part of a saved tensor."""
    weight = mesh.local_part(param.detach())
    if not isinstance(value, Tensor):
        raise OptimizerError(f"State {name!r} in the checkpoint is a {type(value).__name__}. Save tensors.")
    value = mesh.local_part(value.detach())
    if value.shape != weight.shape and value.shape == param.shape:
        value = mesh.part_of(param, value)
    if value.shape != weight.shape:
        raise OptimizerError(
            f"State {name!r} in the checkpoint has shape {tuple(value.shape)}, its weight {tuple(weight.shape)}. "
            "Load a checkpoint of the same model, with parameters in the same order."
        )
    return value.to(weight.device)


def _local_scale(scale: Tensor | None, codes: Tensor, name: str) -> Tensor | None:
    """The scales of the blocks of this process's codes; a shard may carry room for a larger one."""
    if scale is None:
        return None
    local = mesh.local_part(scale.detach()).to(codes.device)
    wanted = -(-codes.numel() // BLOCK)
    spare = wanted if mesh.is_distributed(scale) else local.numel()
    if local.numel() < wanted or spare != wanted:
        raise OptimizerError(
            f"State {name!r} in the checkpoint has {local.numel()} scales for {codes.numel()} codes. "
            "Load 8-bit states on the number of processes that saved them."
        )
    return local[:wanted]
