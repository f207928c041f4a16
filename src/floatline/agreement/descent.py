"""From a whole computation down to the smallest module that shows the difference, and the operation in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from floatline.agreement.layers import find_suspects, read_layers
from floatline.agreement.measuring import Measured, is_same, measure_pair
from floatline.agreement.operations import find_rounding, match_operations
from floatline.agreement.place import EntryPlace, OpPlace
from floatline.agreement.sides import Given, Side

ChildOf = Callable[[Side, Side, str], "tuple[Side, Side] | None"]
_MOST_SUSPECTS = 8
_SECOND = re.compile(r" \(\d+\)$")


@dataclass(frozen=True)
class DescentEnd:
    """Where a descent ended: the place, the two sides there, and what they were called with."""

    place: EntryPlace
    a: Side
    b: Side
    given: Given


def find_child(a: Side, b: Side, name: str) -> tuple[Side, Side] | None:
    """The modules of that name in both; None where B has none."""
    name = _SECOND.sub("", name)
    if a.module is None or b.module is None or b.opaque:
        return None
    try:
        return Side.of(a.module.get_submodule(name), a.around), Side.of(b.module.get_submodule(name), b.around)
    except AttributeError:
        return None


def descend(
    a: Side, b: Side, given: Given, measured: Measured, *, backward: bool, child_of: ChildOf = find_child
) -> DescentEnd:
    """Follow a difference from module to module, each time on inputs that both sides share.

    Args:
        a: The first side.
        b: The second side.
        given: The arguments of both.
        measured: What was measured of them, with their layers.
        backward: Whether gradients are compared.
        child_of: Gives the two sides of a module below.
    """
    path, others = "", tuple[str, ...]()
    while True:
        suspects = [label for label in find_suspects(read_layers(measured)) if label in measured.a.calls]
        every = _outermost(measured.a.calls) if measured.worst.verdict != "agree" else []
        off = _find_off(a, b, measured, every, child_of, backward=backward)
        if not off:  # what is added to a part may hide that it is off: deeper ones are looked at by themselves
            off = _find_off(a, b, measured, suspects[:_MOST_SUSPECTS], child_of, backward=backward, first=True)
        if not off:
            break
        label, a, b, given, measured = max(off, key=lambda one: one[4].worst.weight)
        path = f"{path}.{label}" if path else label
        others = tuple(one[0] for one in off if one[0] != label)
    kind = type(a.plain).__name__ if isinstance(a.plain, nn.Module) else ""
    op = None if b.opaque else _find_operation(a, b, given, measured, backward=backward)
    return DescentEnd(EntryPlace(path, kind, measured.worst, op, others), a, b, given)


def _find_off(
    a: Side,
    b: Side,
    measured: Measured,
    labels: Sequence[str],
    child_of: ChildOf,
    *,
    backward: bool,
    first: bool = False,
) -> list[tuple[str, Side, Side, Given, Measured]]:
    """Modules that do not agree by themselves, on what A called them with; or the first of them."""
    off: list[tuple[str, Side, Side, Given, Measured]] = []
    for label in labels:
        pair = child_of(a, b, label)
        if pair is None:
            continue
        given, gradients = measured.a.calls[label], _gradients_of(measured, label)
        # Gradients of another format are rounded on their way into a module, which its own roundings do not tell.
        alike = backward and pair[0].formats() == pair[1].formats()
        try:
            if not b.opaque and is_same(*pair, given, backward=alike, cotangents=gradients):
                continue
            found = measure_pair(*pair, given, backward=alike, cotangents=gradients, look=True)
        except Exception:  # noqa: S112 - modules that another caller prepares, or of another signature
            continue
        if found.worst.verdict != "agree":
            off.append((label, *pair, given, found))
            if first:
                break
    return off


def _outermost(calls: Mapping[str, Given]) -> list[str]:
    """Modules that are called, and not from inside another one that is."""
    names = {_SECOND.sub("", label) for label in calls}

    def inside(label: str) -> bool:
        words = _SECOND.sub("", label).split(".")
        return any(".".join(words[:end]) in names for end in range(1, len(words)))

    return [label for label in calls if not inside(label)]


def _gradients_of(measured: Measured, label: str) -> dict[str, Tensor]:
    """The gradients of what a module gave, by the names that a run of it alone uses.

    They are A's, rounded to the format that B gives there: each side and FP32 then start from the same numbers.
    """
    found: dict[str, Tensor] = {}
    for key, gradient in measured.a.layer_gradients.items():
        if key == label or key.startswith(f"{label}["):
            format_of_b = measured.b.layers.get(key, gradient).dtype
            found[f"output{key.removeprefix(label)}"] = gradient.to(format_of_b).to(gradient.dtype)
    return found


def _find_operation(a: Side, b: Side, given: Given, measured: Measured, *, backward: bool) -> OpPlace | None:
    worst = measured.worst
    try:
        if worst.verdict == "other-function":
            dtype = torch.float64 if worst.exact == "FP64" else torch.float32
            return match_operations(a, b, given, dtype=dtype, backward=backward and worst.phase == "backward")
        if worst.verdict == "agree":
            return None
        side = a if worst.side == "A" else b
        return find_rounding(side, given, backward=backward and worst.phase == "backward")
    except Exception:
        return None  # what was measured stands without it
