"""Operations over lists of tensors, as optimizers use them: what belongs to which tensor of the list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from floatline.probe.schemas import Call

_PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")


def count_parts(call: Call) -> int:
    """How many tensors an operation treats alike, each for itself; 1 for one that is not over a list."""
    first = call.named[0][1] if call.named else None
    if not call.schema.base.startswith(_PREFIXES) or not isinstance(first, (list, tuple)):
        return 1
    return len(first)  # pyright: ignore[reportUnknownArgumentType]


def find_places(names: Sequence[str], num_parts: int) -> list[int | None]:
    """For each tensor, given the name of its argument, its place in the list; None: it belongs to all of them."""
    count, sizes = Counter[str](), Counter(names)
    places: list[int | None] = []
    for name in names:
        places.append(count[name] if num_parts > 1 and sizes[name] == num_parts else None)
        count[name] += 1
    return places
