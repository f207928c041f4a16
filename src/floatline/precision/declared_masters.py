"""Master copies that weights name themselves: as Megatron and DeepSpeed keep them, read without either package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from floatline.optim.mesh import local_part


def read_masters(weights: Iterable[Tensor], held: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """The weights that tensors of an optimizer are the master copies of, by the ids of those tensors.

    Megatron keeps the copy, or this process's part of it, as `weight.main_param`. DeepSpeed keeps the copies of many
    weights in one flat tensor, and this process's part of each, a view of it, as `weight._hp_mapping.hp_fragment`; its
    third stage knows the place by the weight's number.

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
    third: Any = getattr(weight, "_z3_optimizer", None)
    if third is not None:
        with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):  # where another version keeps it
            group, start, num = third.grad_position[third.get_param_id(weight)]
            return third.fp32_partitioned_groups_flat[group].detach().narrow(0, start, num)
    mapping: Any = getattr(weight, "_hp_mapping", None)
    fragment = getattr(mapping, "hp_fragment", None)
    return fragment if isinstance(fragment, Tensor) else None


def is_kept_elsewhere(weight: Tensor) -> bool:
    """Whether the master copy of a weight is another process's: ZeRO and Megatron cut them between processes."""
    own: Any = weight
    by_zero = hasattr(own, "_hp_mapping") and own._hp_mapping is None
    return by_zero or (getattr(own, "main_param_sharded", False) and getattr(own, "main_param", None) is None)


def local_size(weight: Tensor) -> int:
    """Elements of a weight that are this process's; ZeRO's third stage has freed the tensor itself by now."""
    part: Any = getattr(weight, "ds_tensor", None)
    return (part if isinstance(part, Tensor) else local_part(weight)).numel()


def _find_storage(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()
