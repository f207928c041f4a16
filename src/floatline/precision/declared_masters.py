"""Master copies that weights name themselves: as Megatron and DeepSpeed keep them, read without either package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from floatline.optim.mesh import local_part


def read_masters(weights: Iterable[Tensor], held: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """The weights that tensors of an optimizer are the master copies of, by the ids of those tensors.

    Megatron keeps the copy, or this process's part of it, as `weight.main_param`. DeepSpeed keeps the copies of many
    weights in one flat tensor, and this process's part of each, a view of it, as `weight._hp_mapping.hp_fragment`.

    Args:
        weights: The parameters of the modules.
        held: What the optimizers step.
    """
    held = list(held)
    by_id = {id(tensor): tensor for tensor in held}
    by_storage = {place: tensor for tensor in held if (place := _find_storage(tensor))}
    found: dict[int, list[Tensor]] = {}
    for weight in weights:
        for copy in (getattr(weight, "main_param", None), read_fragment(weight)):
            if not isinstance(copy, Tensor):
                continue
            owner = by_id.get(id(copy), by_storage.get(_find_storage(copy)))
            if owner is not None and owner is not weight:
                found.setdefault(id(owner), []).append(weight)
    return found


def read_fragment(weight: Tensor) -> Tensor | None:
    """This process's part of a weight's master copy in a flat tensor of DeepSpeed's; None where there is none."""
    mapping: Any = getattr(weight, "_hp_mapping", None)
    fragment = getattr(mapping, "hp_fragment", None)
    return fragment if isinstance(fragment, Tensor) else None


def _find_storage(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()
