"""Tensors inside what modules take and return: lists, tuples, mappings, dataclasses, to any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, cast

from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same structure with every tensor changed; the very same object where nothing was.

    Args:
        change: Gives the new tensor, or the old one.
        tree: What a module takes or returns. Objects of other kinds are left alone.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, MutableMapping):
        return _map_items(change, cast("MutableMapping[Any, Any]", tree))
    if isinstance(tree, list | tuple):
        return _map_sequence(change, cast("list[Any] | tuple[Any, ...]", tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_fields(change, tree)
    return tree


def _map_items(change: Callable[[Tensor], Tensor], tree: MutableMapping[Any, Any]) -> Any:
    items = {key: map_tensors(change, value) for key, value in tree.items()}
    if all(items[key] is value for key, value in tree.items()):
        return tree
    # A copy and not a new object: subclasses have constructors of their own.
    changed = copy.copy(tree)
    for key, value in items.items():
        changed[key] = value
    return changed


def _map_sequence(change: Callable[[Tensor], Tensor], tree: list[Any] | tuple[Any, ...]) -> Any:
    values = [map_tensors(change, value) for value in tree]
    if all(new is old for new, old in zip(values, tree, strict=True)):
        return tree
    make: Callable[[Iterable[Any]], Any] = getattr(type(tree), "_make", type(tree))  # named tuples have _make
    return make(values)


def _map_fields(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    values = {field.name: getattr(tree, field.name, None) for field in dataclasses.fields(tree)}
    changed = {name: map_tensors(change, value) for name, value in values.items()}
    if all(changed[name] is value for name, value in values.items()):
        return tree
    result = copy.copy(tree)
    for name, value in changed.items():
        if value is not values[name]:
            object.__setattr__(result, name, value)  # also where the class is frozen
    return result


def find_tensors(*trees: Any) -> list[Tensor]:
    """Every tensor in the trees, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for tree in trees:
        map_tensors(note, tree)
    return found
