"""Weights in and out: the float32 numbers being trained, by name, as safetensors any tool reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from floatline.errors import OptimizerError, suggest
from floatline.optim import mesh, storage
from floatline.optim.rules import RuledOptimizer


@torch.no_grad()
def master_state_dict(optimizer: RuledOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """The model's state with every weight as the float32 number that is being trained.

    Numerics:
        Trained 16-bit weights are joined with what stands beside them; other 16-bit tensors are widened. Nothing
        is rounded. Sharded weights are gathered: every process must call this.

    Args:
        optimizer: The optimizer.
        model: The model whose parameters it trains.

    Returns:
        New tensors by the names of `model.state_dict()`; none share memory.
    """
    held = {id(param): param for param in _params(optimizer)}
    own = _named(model)
    if held.keys() - {id(tensor) for tensor in own.values()}:
        raise OptimizerError("The optimizer trains parameters that this model does not have. Pass the model it trains.")
    return {name: _master(optimizer, tensor, trained=id(tensor) in held) for name, tensor in own.items()}


def save_master(optimizer: RuledOptimizer, model: nn.Module, path: str | Path) -> None:
    """Write the float32 weights to a safetensors file; in a group of processes the first one writes.

    Args:
        optimizer: The optimizer.
        model: The model whose parameters it trains.
        path: The file.
    """
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    tensors = {name: tensor.cpu().contiguous() for name, tensor in master_state_dict(optimizer, model).items()}
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    save_file(tensors, path, metadata={"format": "pt"})


@torch.no_grad()
def load_master(optimizer: RuledOptimizer, model: nn.Module, tensors: Mapping[str, Tensor] | str | Path) -> None:
    """Set weights, and what stands beside them, from float32 weights; moments and step counters stay.

    Numerics:
        With update="exact" the weights that are trained from here on are the given ones, bit for bit within the
        bounds of `split_master`. With "stochastic" and "nearest" they are the nearest 16-bit ones.

    Args:
        optimizer: The optimizer.
        model: The model whose parameters it trains.
        tensors: Weights by name, or a safetensors file.
    """
    if isinstance(tensors, (str, Path)):
        from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

        tensors = load_file(tensors)
    own = _named(model)
    for name in tensors:
        if name not in own:
            raise OptimizerError(f"The model has no tensor {name!r}. {suggest(name, own)}")
    given = {id(own[name]) for name in tensors}
    for name, tensor in own.items():
        if id(tensor) not in given:
            raise OptimizerError(f"The weights lack {name!r}. Save them with master_state_dict or save_master.")
    _check_tied(own, tensors)
    held = {id(param) for param in _params(optimizer)}
    for name, value in tensors.items():
        _set(optimizer, own[name], value, name=name, trained=id(own[name]) in held)


def _check_tied(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuse two values for one weight: the later name would win, and the other would be lost without a word."""
    first: dict[int, str] = {}
    for name, value in tensors.items():
        other = first.setdefault(id(own[name]), name)
        before = tensors[other]
        if before is value or before.shape != value.shape:  # another shape is refused with both shapes
            continue
        before = before.to(value.device)
        differ = (before != value) & ~(before.isnan() & value.isnan())
        if bool(differ.any()):
            raise OptimizerError(
                f"{other!r} and {name!r} are one tied weight, and their values differ in {int(differ.sum()):,} of "
                f"{value.numel():,} elements. Give the weight under one of its names, or the same values under both."
            )


def _master(optimizer: RuledOptimizer, tensor: Tensor, *, trained: bool) -> Tensor:
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return _whole(tensor.detach()).clone()
    local = mesh.local_part(tensor.detach())
    state = cast("Mapping[str, Tensor]", optimizer.state.get(tensor, {}) if trained else {})
    extra = next((state[key] for key in storage.EXTRAS.values() if key in state), None)
    wide = storage.load_weight(local, None if extra is None else mesh.local_part(extra))
    return _whole(mesh.like_param(tensor, "master", wide))


def _whole(tensor: Tensor) -> Tensor:
    return cast(Any, tensor).full_tensor() if mesh.is_distributed(tensor) else tensor


def _set(optimizer: RuledOptimizer, tensor: Tensor, value: Tensor, *, name: str, trained: bool) -> None:
    local = mesh.local_part(tensor.detach())
    if value.shape != tensor.shape:
        raise OptimizerError(
            f"Weight {name!r} has shape {tuple(value.shape)} and the model's {tuple(tensor.shape)}. "
            "Load weights of the same model."
        )
    if mesh.is_distributed(tensor):
        value = mesh.part_of(tensor, value)
    value = value.to(local.device)
    if local.dtype not in (torch.float16, torch.bfloat16):
        local.copy_(value)
        return
    master = value.to(torch.float32)
    weight, extra = storage.store_weight(master, local.dtype, optimizer.update if trained else "nearest")
    if bool((master.isfinite() & ~storage.load_weight(weight, extra).isfinite()).any()):
        largest = torch.finfo(local.dtype).max
        raise OptimizerError(
            f"Weight {name!r} holds {float(master.abs().max()):g}, and {local.dtype} ends at {largest:g}. "
            "Use bfloat16 weights."
        )
    local.copy_(weight)
    if extra is not None:
        fresh = storage.new_extra(local, optimizer.update)
        for key, place in fresh.items():
            place.copy_(extra)
            optimizer.state[tensor][key] = mesh.like_param(tensor, key, place)


def _named(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by name, the objects themselves; a tied one appears under each of its names."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _params(optimizer: RuledOptimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
