"""Choice: which power of two each group of values is scaled by, from measured ranges; and what stands in the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from floatline.folding.exponents import Exponents
from floatline.folding.homogeneity import Unknown
from floatline.folding.recorded_graph import Graph, GraphCall, values_in
from floatline.formats import find_format

LARGEST = find_format("fp16").max


@dataclass(frozen=True)
class FoldedGroup:
    """Values that are scaled together.

    Attributes:
        exponent: They are multiplied by two to this power.
        largest: The largest of them before, in magnitude.
        place: Where that is made.
    """

    exponent: int
    largest: float
    place: str


@dataclass(frozen=True)
class Obstacle:
    """A value too large for FP16 that no scale can help.

    Attributes:
        place: Where it is made.
        largest: Its largest magnitude.
        why: What asks for it as it is.
        modules: What would have to compute in FP32: who makes the value, and who reads it.
    """

    place: str
    largest: float
    why: str
    modules: tuple[str, ...]

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.place}: {self.largest:.3g} does not fit and cannot be scaled: {self.why}"


@dataclass(frozen=True)
class ChosenExponents:
    """Exponents for a graph, with their reasons."""

    exponents: dict[Unknown, int]
    groups: tuple[FoldedGroup, ...]
    obstacles: tuple[Obstacle, ...]


def choose_exponents(graph: Graph, exponents: Exponents, *, margin: float) -> ChosenExponents:
    """Scale each group that needs it by the power of two nearest to one under which all of it fits FP16.

    Args:
        graph: Its values, with their ranges; only those that are in 16 bits count.
        exponents: Which of them can be scaled, and together with which.
        margin: How many times larger than measured a value may become.
    """
    makers = _find_makers(graph)
    chosen: dict[Unknown, Fraction] = {}
    groups: list[FoldedGroup] = []
    unfit: dict[int, str] = {}
    for root, members in exponents.groups().items():
        sized = {
            node: factor for node, factor in members.items() if isinstance(node, int) and graph.nodes[node].sixteen
        }
        if not any(graph.nodes[node].largest > _limit(graph, node, margin) for node in sized):
            continue
        step = math.lcm(*(factor.denominator for factor in members.values()))
        value = next(
            (found for room in (margin, 1.0) if (found := _nearest(graph, sized, step, room)) is not None), None
        )
        if value is None:
            partner = max(sized, key=lambda node: graph.nodes[node].largest if sized[node] < 0 else 0.0)
            why = f"what shrinks it makes {_describe(graph, makers, partner)} too large"
            unfit |= {node: why for node in sized if graph.nodes[node].largest > LARGEST}
            continue
        if value:
            chosen[root] = Fraction(value)
            worst = max(sized, key=lambda node: graph.nodes[node].largest)
            groups.append(
                FoldedGroup(int(value * sized[worst]), graph.nodes[worst].largest, _describe(graph, makers, worst))
            )
    for number, node in enumerate(graph.nodes):
        if node.largest > LARGEST and node.sixteen and (why := exponents.why_zero(number)):
            unfit[number] = why
    found = _whole(graph, exponents, chosen)
    for number, node in enumerate(graph.nodes):
        if node.kind == "parameter" and node.largest * 2.0 ** found.get(number, 0) > LARGEST >= node.largest:
            unfit[number] = f"what the fold makes of it is 2^{found[number]} times as large"
    return ChosenExponents(found, tuple(groups), _obstacles(graph, makers, unfit))


def _whole(graph: Graph, exponents: Exponents, chosen: dict[Unknown, Fraction]) -> dict[Unknown, int]:
    """The exponents of weights and settings; in larger steps where one that is used twice would get half of one."""

    def assign() -> dict[Unknown, Fraction]:
        every = exponents.assign(chosen).items()
        return {one: value for one, value in every if not isinstance(one, int) or graph.nodes[one].kind == "parameter"}

    step = math.lcm(*(value.denominator for value in assign().values()))
    for root, value in chosen.items():
        chosen[root] = Fraction(step * (math.ceil if value > 0 else math.floor)(value / step))
    return {one: int(value) for one, value in assign().items()}


def _limit(graph: Graph, node: int, margin: float) -> float:
    """How large a value may be; weights are the same on every input and need no margin."""
    return LARGEST if graph.nodes[node].kind == "parameter" else LARGEST / margin


def _nearest(graph: Graph, members: dict[int, Fraction], step: int, margin: float) -> int | None:
    """The exponent nearest to zero under which all members fit."""
    low, high = -math.inf, math.inf
    for node, factor in members.items():
        largest = graph.nodes[node].largest
        if not largest:
            continue
        room = math.log2(_limit(graph, node, margin) / largest)
        if factor > 0:
            high = min(high, room / factor)
        else:
            low = max(low, room / factor)
    nearest = min(max(0.0, low), high)
    value = step * (math.ceil(nearest / step) if nearest > 0 else math.floor(nearest / step))
    return value if low <= value <= high else None


def _find_makers(graph: Graph) -> dict[int, GraphCall]:
    """The operation that made each storage."""
    calls = reversed(graph.calls)  # views come later
    found = {value.node: call for call in calls for value in call.results if value.node >= 0}
    return {number: call for number, call in found.items() if graph.nodes[number].kind == "made"}


def _describe(graph: Graph, makers: dict[int, GraphCall], node: int) -> str:
    return makers[node].place if node in makers else graph.nodes[node].name


def _obstacles(graph: Graph, makers: dict[int, GraphCall], unfit: dict[int, str]) -> tuple[Obstacle, ...]:
    modules: dict[int, set[str]] = {number: set() for number in unfit}
    for call in graph.calls:
        touched = {value.node for value in (*call.results, *values_in((call.args, call.kwargs)))}
        for number in touched & modules.keys():
            modules[number].add(call.module)
    return tuple(
        Obstacle(_describe(graph, makers, number), graph.nodes[number].largest, why, tuple(sorted(modules[number])))
        for number, why in unfit.items()
    )
