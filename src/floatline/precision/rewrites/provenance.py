"""Provenance: from which tensor, and by which function, another one was made, while nobody has written to either."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Origin:
    """What a tensor was made from.

    Args:
        kind: The function, such as 'sigmoid'.
        source: What it was applied to.
        options: What else it was given, such as `dim`.
        moves: Functions that moved its elements since, in order; none of them computed anything.
        watched: Tensors that all this depends on, each with its counter of writes.
    """

    kind: str
    source: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    watched: tuple[tuple[Tensor, int], ...] = ()

    def move(self, tensor: Tensor) -> Tensor:
        """Move a tensor's elements as those of the made tensor were."""
        for move in self.moves:
            tensor = move(tensor)
        return tensor


class Origins:
    """Where the tensors of one call came from. It keeps no tensor alive but what living ones were made from."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def note(self, made: Any, kind: str, source: Tensor, *, watch: Iterable[Any] = (), **options: Any) -> None:
        """Remember what a tensor was made from; `watch` is what else it depends on."""
        self._keep(made, Origin(kind, source, options, watched=_count([source, *watch])))

    def note_as(self, made: Any, origin: Origin, kind: str) -> None:
        """Remember that a tensor is one more elementwise function of the same source."""
        self._keep(made, replace(origin, kind=kind))

    def note_moved(self, made: Any, origin: Origin, move: Move, *, watch: Iterable[Any]) -> None:
        """Remember that a tensor has the elements of one with that origin."""
        self._keep(made, replace(origin, moves=(*origin.moves, move), watched=origin.watched + _count(watch)))

    def find(self, tensor: Any, *kinds: str) -> Origin | None:
        """Where a tensor came from, if it is of these kinds and nothing of it was written to since."""
        if not isinstance(tensor, Tensor):
            return None
        origin, version = self._known.get(tensor, (None, 0))
        if origin is None or origin.kind not in kinds or _version(tensor) != version:
            return None
        return origin if all(_version(other) == count for other, count in origin.watched) else None

    def forget(self) -> None:
        """Let go of everything."""
        self._known.clear()

    def _keep(self, made: Any, origin: Origin) -> None:
        if isinstance(made, Tensor) and not made.is_inference():  # inference mode does not count writes
            self._known[made] = origin, _version(made)


def is_bare(tensor: Tensor) -> bool:
    """Whether nothing but the functions that made a tensor hangs on it: no hook, no gradient of its own."""
    if tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad):
        return False
    return not tensor._backward_hooks  # pyright: ignore[reportPrivateUsage]


def _count(values: Iterable[Any]) -> tuple[tuple[Tensor, int], ...]:
    tensors = [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)]
    return tuple((tensor, _version(tensor)) for tensor in tensors)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]
