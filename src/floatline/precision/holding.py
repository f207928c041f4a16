"""Holding: what tensors of a model and its optimizers are held in, by kind and layer group. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

HeldKind = Literal["weights", "frozen", "gradients", "accumulation", "states", "master", "buffers"]
LayerGroup = Literal["embeddings", "norms", "head", "adapters", "body"]
KINDS: tuple[HeldKind, ...] = ("weights", "frozen", "master", "gradients", "accumulation", "states", "buffers")
NARROW_FORMATS = ("fp16", "bf16")


@dataclass(frozen=True)
class Holding:
    """Tensors of one kind, layer group and format.

    Args:
        kind: 'weights' are trained, 'frozen' ones are not; 'master' is what a trained weight is a rounded copy of;
            'accumulation' is a buffer apart from the gradients that they are added up in.
        group: The layers that they belong to.
        name: Of a state, such as 'exp_avg_sq', or what buffers are for: 'averages' or 'positions'; '' for others.
        format: Such as 'bf16'.
        num_tensors: How many tensors.
        num_elements: Their elements on this process.
        example: The name of the first one.
    """

    kind: HeldKind
    group: LayerGroup
    name: str
    format: str
    num_tensors: int
    num_elements: int
    example: str


def formats_of(holdings: Iterable[Holding], kind: HeldKind, *, group: str = "") -> Counter[str]:
    """Elements by format, the most first."""
    found: Counter[str] = Counter()
    for row in holdings:
        if row.kind == kind and row.group == (group or row.group):
            found[row.format] += row.num_elements
    return Counter(dict(found.most_common()))


def say_formats(formats: Counter[str]) -> str:
    """'BF16', or 'BF16 and FP32' where there are several, the most first."""
    return " and ".join(name.upper() for name, _ in formats.most_common())


def is_without_master(holdings: Sequence[Holding]) -> bool:
    """Whether some trained weights are 16-bit, and nothing keeps the bits that they drop."""
    narrow = [row for row in holdings if row.kind == "weights" and row.format in NARROW_FORMATS]
    kept = {row.group for row in holdings if row.kind == "master"}
    return any(row.group not in kept for row in narrow)


def describe_holdings(holdings: Sequence[Holding]) -> str:
    """One line: 'weights BF16 without a master copy, states BF16, buffers FP32'."""
    parts = [f"weights {say_formats(formats_of(holdings, 'weights')) or 'none'}"]
    master = formats_of(holdings, "master")
    if master:
        parts[0] += f" with a master copy in {say_formats(master)}"
    elif is_without_master(holdings):
        parts[0] += " without a master copy"
    kinds: tuple[HeldKind, ...] = ("frozen", "gradients", "accumulation", "states", "buffers")
    for kind in kinds:
        formats = formats_of(holdings, kind)
        if formats:
            parts.append(f"{kind} {say_formats(formats)}")
    return ", ".join(parts)
