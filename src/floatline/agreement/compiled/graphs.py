"""The graphs that torch.compile sees, cut to the smallest run of nodes that its backend gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from floatline.agreement.compiled.backends import Compiler
from floatline.agreement.measuring import Measured, measure_pair
from floatline.agreement.sides import Given, Side, run_side


@dataclass(frozen=True)
class GraphPart:
    """A few nodes of a graph, and what they are called with.

    Args:
        graph: The nodes as a module.
        values: The inputs, in order.
        measured: Eager against compiled.
    """

    graph: fx.GraphModule
    values: tuple[Any, ...]
    measured: Measured

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that compute."""
        return _calls(self.graph)


@dataclass(frozen=True)
class _SeenGraphs:
    graph: fx.GraphModule
    values: tuple[Any, ...]


def find_smallest(plain: Callable[..., Any], given: Given, compiler: Compiler, *, backward: bool) -> GraphPart | None:
    """The smallest run of nodes that shows a wrong result by itself; None where only the whole does.

    The end is cut first, then the start, each by halves: nodes that are wrong together are taken to be so with fewer,
    until they no longer are.

    Args:
        plain: The eager function or module.
        given: Its arguments.
        compiler: What is wrong with it.
        backward: Whether gradients are compared, too.
    """
    for seen in _capture(plain, given, backward=backward):
        values = _run_all(seen)
        calls = _calls(seen.graph)

        def judge(
            start: int, end: int, seen: _SeenGraphs = seen, values: Mapping[fx.Node, Any] = values
        ) -> GraphPart | None:
            return _judge(seen.graph, values, start, end, compiler, backward=backward)

        part = judge(0, len(calls))
        if part is None:
            continue
        start, end = 0, len(calls)
        low = 1
        while low < end:  # the shortest prefix that is wrong
            middle = (low + end) // 2
            found = judge(0, middle)
            if found is None:
                low = middle + 1
            else:
                part, end = found, middle
        high = end - 1
        while start < high:  # the latest start that is wrong
            middle = (start + high + 1) // 2
            found = judge(middle, end)
            if found is None:
                high = middle - 1
            else:
                part, start = found, middle
        return part
    return None


def _capture(plain: Callable[..., Any], given: Given, *, backward: bool) -> list[_SeenGraphs]:
    """The graphs of one run, with what each was called with."""
    found: list[_SeenGraphs] = []

    def note(graph: fx.GraphModule, _examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            kept = tuple(v.detach().clone().requires_grad_(v.requires_grad) if _is_float(v) else v for v in values)
            found.append(_SeenGraphs(graph, kept))
            return graph(*values)

        return run

    side = Compiler(note).compile(plain)
    run_side(side.function, given, backward=backward)
    return found


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _run_all(seen: _SeenGraphs) -> dict[fx.Node, Any]:
    """The value of every node."""
    values: dict[fx.Node, Any] = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    Keeping(seen.graph).run(*seen.values)  # pyright: ignore[reportUnknownMemberType]
    return values


def _calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op.startswith("call_")]


def _judge(
    whole: fx.GraphModule, values: Mapping[fx.Node, Any], start: int, end: int, compiler: Compiler, *, backward: bool
) -> GraphPart | None:
    """A window of nodes, where it is wrong by itself."""
    cut = _cut(whole, values, start, end)
    if cut is None:
        return None
    part, inputs = cut
    plain = Side.of(part)
    try:
        measured = measure_pair(plain, compiler.compile(part), Given(inputs), backward=backward)
    except Exception:
        return None  # nodes that cannot stand alone
    return GraphPart(part, inputs, measured) if measured.worst.verdict == "wrong" else None


def _cut(
    whole: fx.GraphModule, values: Mapping[fx.Node, Any], start: int, end: int
) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """Some nodes as a module of their own: it takes what they read from outside, and gives what is used outside."""
    window = _calls(whole)[start:end]
    inside = set(window)
    graph = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    inputs: list[Any] = []
    outside = list(dict.fromkeys(node for one in window for node in one.all_input_nodes if node not in inside))
    for node in outside:
        mapped[node] = graph.placeholder(node.name)
        value = values[node]
        inputs.append(value.detach().clone().requires_grad_(value.requires_grad) if _is_float(value) else value)
    for node in window:
        mapped[node] = graph.node_copy(node, lambda old: mapped[old])
    used = [n for n in window if any(user not in inside for user in n.users) and isinstance(values[n], Tensor)]
    if not used:
        return None
    graph.output(tuple(mapped[node] for node in used))
    return fx.GraphModule(whole, graph), tuple(inputs)
