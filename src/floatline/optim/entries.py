"""What a backend works on: one parameter that has a gradient, with everything that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # elements that share one scale of an 8-bit state


@dataclass(slots=True)
class Entry:
    """One parameter with its gradient and its state, all of them on this process and this device.

    Backends change weight and state in place and never put another tensor in their place: for a sharded
    parameter these are the local tensors of DTensors that live elsewhere.

    Args:
        weight: The parameter, float32, float16 or bfloat16; the local shard of a DTensor.
        grad: Its gradient, of any floating dtype; the local shard of a DTensor.
        state: "step" (float32, one number), the rule's states, "remainder" (int16) or "compensation" for a
            16-bit weight, and "<name>_scale" (float32, one for each 256 elements) for an 8-bit state. States have
            the weight's shape and, where the weight is dense in memory, its strides.
        group: The parameter group, with its hyperparameters.
        stream: Number of the parameter in the optimizer; part of the key of every random choice.
        start: Index of the weight's first element in the whole tensor; 0 unless the weight is a shard.
    """

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    group: dict[str, Any]
    stream: int
    start: int


def state_stream(stream: int) -> int:
    """The random stream of a parameter's states: apart from the weight's own, and from every other parameter's.

    Args:
        stream: The parameter's number, below 2**28.
    """
    return stream + (1 << 28)


def fill(entries: list[Entry]) -> None:
    """Give the entries their gradients, where the list holds these apart."""
    own = getattr(entries, "fill", None)
    if own is not None:
        own()


def by_device(entries: list[Entry]) -> dict[torch.device, list[Entry]]:
    """The entries of each device, in their order; the list itself where there is only one device."""
    places = {entry.weight.device for entry in entries}
    if len(places) == 1:
        return {places.pop(): entries}
    fill(entries)
    found: dict[torch.device, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.weight.device, []).append(entry)
    return found
