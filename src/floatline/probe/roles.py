"""Roles: what tensors are called outside the step, by the memory they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from floatline.probe.storages import Storages


def weights_of(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of every parameter and buffer."""
    for name, parameter in model.named_parameters():
        yield "param", name, parameter
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer


def name_start(storages: Storages, model: nn.Module, batch: tuple[Sequence[Any], Sequence[Any]]) -> None:
    """Name what a step starts from."""
    for kind, name, tensor in weights_of(model):
        storages.name(tensor, f"{kind}:{name}")
    for role, tensor in batch_tensors(batch):
        storages.name(tensor, role)


def batch_tensors(batch: tuple[Sequence[Any], Sequence[Any]]) -> Iterator[tuple[str, Tensor]]:
    """Role and tensor of what a batch holds, such as 'inputs[0]'."""
    for kind, tensors in zip(("inputs", "targets"), batch, strict=True):
        for i, value in enumerate(tensors):
            if isinstance(value, Tensor):
                yield f"{kind}[{i}]", value


def name_state(storages: Storages, model: nn.Module, optimizer: Any) -> None:
    """Name the state that an optimizer keeps for the parameters of a model."""
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(value, Tensor):
                storages.name(value, f"state:{names.get(id(parameter), '')}.{key}")
