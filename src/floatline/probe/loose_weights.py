"""LooseWeights: the weights of a loop that has no module, with the names that its code gives them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn


class LooseWeights(nn.Module):
    """Stands for a model that is none.

    Args:
        tensors: The weights.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        names = _find_names()
        self._tensors = {names.get(id(tensor), f"weight {i}"): tensor for i, tensor in enumerate(tensors)}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """The weights and their names."""
        yield from self._tensors.items()


def _find_names() -> dict[int, str]:
    """Names of the tensors among a script's globals, also inside lists and dicts, by id."""
    names: dict[int, str] = {}
    for name, value in list(vars(sys.modules["__main__"]).items()):
        items: list[tuple[str, Any]] = [(name, value)]
        if isinstance(value, dict):
            items = [(f"{name}[{key!r}]", one) for key, one in value.items()]  # pyright: ignore[reportUnknownVariableType]
        elif isinstance(value, (list, tuple)):
            items = [(f"{name}[{i}]", one) for i, one in enumerate(value)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        for text, one in items:
            if isinstance(one, Tensor):
                names.setdefault(id(one), text)
    return names
