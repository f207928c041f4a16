"""Sets of modules: which lies in which, what a set costs, and the smallest part of one that passes a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ModuleTree:
    """The modules of a model by name, in their order, with what each of them costs in FP32.

    Args:
        sizes: Elements of the parameters in a module and below it, by name; '' is the model.
    """

    sizes: Mapping[str, int]

    def normalize(self, names: Iterable[str]) -> tuple[str, ...]:
        """The set in the model's order, without modules that lie inside another member."""
        given = set(names)
        return tuple(name for name in self.sizes if name in given and not any(is_inside(name, o) for o in given))

    def children(self, name: str) -> tuple[str, ...]:
        """The modules directly below one."""
        start = f"{name}." if name else ""
        return tuple(n for n in self.sizes if n and n.startswith(start) and "." not in n[len(start) :] and n != name)

    def cost(self, names: Iterable[str]) -> tuple[int, int]:
        """What a set gives up, to be compared: parameters in FP32, then members."""
        members = self.normalize(names)
        return sum(self.sizes[name] for name in members), len(members)


def is_inside(name: str, container: str) -> bool:
    """Whether a module lies below another; no module lies in itself."""
    return name != container and (not container or name.startswith(f"{container}."))


def covers(names: Iterable[str], name: str) -> bool:
    """Whether a module is a member, or lies below one."""
    return any(name == member or is_inside(name, member) for member in names)


def minimize(items: Sequence[T], passes: Callable[[list[T]], bool]) -> list[T]:
    """A part of the items that passes, of which no single item can be left out (delta debugging).

    Halves are tried first, then quarters, and so on: one culprit among n takes about 2 log2(n) tests.

    Args:
        items: A row that passes, the likeliest culprits first.
        passes: The test.

    References:
        Zeller and Hildebrandt 2002, Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28(2).
    """
    kept, parts = list(items), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
        smaller = next((chunk for chunk in chunks if len(chunk) < len(kept) and passes(chunk)), None)
        if smaller is not None:
            kept, parts = smaller, 2
            continue
        rests = ([item for item in kept if item not in chunk] for chunk in chunks)
        # With two parts, the rest of one is the other.
        smaller = next((rest for rest in rests if rest and passes(rest)), None) if len(chunks) > 2 else None
        if smaller is not None:
            kept, parts = smaller, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept
