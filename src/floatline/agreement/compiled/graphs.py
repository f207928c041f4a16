"""The graphs that torch.compile sees, cut to the smallest run of nodes that its backend gets wrong."""

# torch shows the regions of a graph to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from floatline.agreement.compiled.backends import Compiler, measure_compiled
from floatline.agreement.compiled.seen_graphs import (
    OPENING,
    GraphNotes,
    SeenGraph,
    find_line,
    find_module,
    is_operation,
    is_region,
)
from floatline.agreement.place import EntryPlace, OpPlace
from floatline.agreement.reading import Reading, Verdict
from floatline.agreement.sides import Around, Given, Side, run_side
from floatline.probe.steps.other_precision import AutocastState

_EXIT: Callable[..., Any] = cast("Any", torch.amp.autocast_mode)._exit_autocast
_MOST_WINDOWS = 30  # that are judged to find what rounding hides: four halvings


@dataclass(frozen=True)
class GraphPart:
    """A few nodes of a graph, and what they are called with.

    Args:
        graph: The nodes as a module.
        values: The inputs, in order.
        autocast: Autocast around it.
        compiler: What is wrong with it.
        reading: Eager against compiled, where it is off.
        whole: The graph that the nodes are from.
    """

    graph: fx.GraphModule
    values: tuple[Any, ...]
    autocast: AutocastState
    compiler: Compiler
    reading: Reading
    whole: fx.GraphModule

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that compute."""
        return _operations(self.graph)

    def place(self, module: str | None = None, kind: str = "") -> EntryPlace:
        """Where it stands in the user's code.

        Args:
            module: Name of the module that it was looked for in; None: the one that the compiler knows.
            kind: Its class.
        """
        names = [_name_of(node.target) for node in self.nodes]
        lines = [line for node in self.nodes if (line := find_line(node))[0]]
        worst = self.reading
        amiss = "wrong" if worst.verdict == "wrong" else "farther from FP32 than rounding explains"
        seen = f"{' and '.join(names)}, compiled alone, {'is' if len(names) == 1 else 'are'} {amiss} on these inputs"
        file, line = lines[0] if lines else ("", 0)
        op = OpPlace(op=", ".join(names), file=file, line=line, phase=worst.phase, seen=seen)
        if module is None:
            module, kind = find_module(self.nodes[0], self.whole)
        return EntryPlace(module, kind, worst, op)


def find_smallest(
    plain: Callable[..., Any], given: Given, compiler: Compiler, *, backward: bool, around: Around = nullcontext
) -> GraphPart | None:
    """The smallest run of nodes that shows a wrong result by itself; None where only the whole does.

    Args:
        plain: The eager function or module.
        given: Its arguments.
        compiler: What is wrong with it.
        backward: Whether gradients are compared, too.
        around: Gives the context that it runs in.
    """
    notes = GraphNotes(tracked=False)
    run_side(Compiler(notes).compile(plain).function, given, backward=backward, around=around)
    found = (shrink(seen, compiler, backward=backward) for seen in notes.graphs)
    return next((part for part in found if part is not None), None)


def shrink(
    seen: SeenGraph, compiler: Compiler, *, backward: bool, verdicts: Collection[Verdict] = ("wrong",)
) -> GraphPart | None:
    """The smallest run of a graph's nodes that is wrong by itself; None where only the whole is.

    The end is cut first, then the start, each by halves: nodes that are wrong together are taken to be so with fewer,
    until they no longer are.

    Args:
        seen: The graph.
        compiler: What is wrong with it.
        backward: Whether gradients are compared, too.
        verdicts: What counts as wrong.
    """
    windows = _Windows(seen, compiler, backward, verdicts)
    return windows.narrow(0, windows.num)


def find_hidden(seen: SeenGraph, compiler: Compiler, *, backward: bool) -> GraphPart | None:
    """The smallest run of nodes that is off by itself, where the rounding of what comes before hides it in the whole.

    Each half, each quarter and so on is judged on the inputs that eager code gave it.

    Args:
        seen: The graph.
        compiler: What is asked about.
        backward: Whether gradients are compared, too.
    """
    windows = _Windows(seen, compiler, backward, ("wrong", "other-function", "farther"))
    parts, judged = 2, 0
    while parts < 2 * windows.num and judged < _MOST_WINDOWS:
        edges = sorted({windows.num * place // parts for place in range(parts + 1)})
        for start, end in itertools.pairwise(edges):
            judged += 1
            if windows.judge(start, end) is not None:
                return windows.narrow(start, end)
        parts *= 2
    return None


class _Windows:
    """Runs of a graph's nodes, each on the inputs that eager code gave it."""

    def __init__(self, seen: SeenGraph, compiler: Compiler, backward: bool, verdicts: Collection[Verdict]) -> None:
        self._seen, self._compiler, self._backward, self._verdicts = seen, compiler, backward, verdicts
        self._values, self._operations = _run_all(seen), _operations(seen.graph)
        self.num = len(self._operations)

    def judge(self, start: int, end: int) -> GraphPart | None:
        """A window, where it is off by itself."""
        seen, cut = self._seen, _cut(self._seen.graph, self._values, self._operations[start:end])
        if cut is None:
            return None
        part, inputs = cut
        try:
            side, given = Side.of(part, seen.around), Given(inputs)
            measured = measure_compiled(side, self._compiler, given, backward=self._backward)
        except Exception:
            return None  # nodes that cannot stand alone
        off = [one for one in measured.readings if one.verdict in self._verdicts and one.blames_b]
        if not off:
            return None
        worst = max(off, key=lambda one: one.weight)
        return GraphPart(part, inputs, seen.autocast, self._compiler, worst, seen.graph)

    def narrow(self, start: int, end: int) -> GraphPart | None:
        """The smallest window inside of one that is off; None where that one is not."""
        part = self.judge(start, end)
        if part is None:
            return None
        low = start + 1
        while low < end:  # the shortest prefix that is off
            middle = (low + end) // 2
            found = self.judge(start, middle)
            if found is None:
                low = middle + 1
            else:
                part, end = found, middle
        high = end - 1
        while start < high:  # the latest start that is off
            middle = (start + high + 1) // 2
            found = self.judge(middle, end)
            if found is None:
                high = middle - 1
            else:
                part, start = found, middle
        return part


def _run_all(seen: SeenGraph) -> dict[fx.Node, Any]:
    """The value of every node, as it was before others wrote into it."""
    values: dict[fx.Node, Any] = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            made = super().run_node(n)
            values[n] = made.clone() if isinstance(made, Tensor) else made
            return made

    with seen.around(), torch.enable_grad():
        Keeping(seen.graph).run(*seen.given.fresh(None, tracked=False).args)  # pyright: ignore
    return values


def _operations(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if is_operation(node)]


def _cut(
    whole: fx.GraphModule, values: Mapping[fx.Node, Any], window: list[fx.Node]
) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """Some nodes as a module of their own: it takes what they read from outside, and gives what is used outside."""
    inside = set(window)
    graph = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    inputs: list[Any] = []
    outside = list(dict.fromkeys(node for one in window for node in one.all_input_nodes if node not in inside))
    for node in outside:
        if node.op == "get_attr":
            mapped[node] = graph.node_copy(node)
            continue
        mapped[node] = graph.placeholder(node.name)
        value = values[node]
        floats = isinstance(value, Tensor) and value.is_floating_point()
        inputs.append(value.detach().clone().requires_grad_(value.requires_grad) if floats else value)
    for node in _with_regions(whole, window):
        if node in inside or all(read in mapped for read in node.all_input_nodes):
            mapped[node] = graph.node_copy(node, lambda old: mapped[old])
    _close_regions(graph)
    used = [n for n in window if any(user not in inside for user in n.users) and isinstance(values[n], Tensor)]
    written = [mapped[node] for node in outside if node.op == "placeholder" and isinstance(values[node], Tensor)]
    if not used and not written:
        return None
    graph.output(tuple(mapped[node] for node in used))
    return fx.GraphModule(whole, graph), tuple(inputs)


def _with_regions(whole: fx.GraphModule, window: list[fx.Node]) -> list[fx.Node]:
    """The nodes of a window with those that begin and end the regions around and between them."""
    nodes = list(whole.graph.nodes)
    first, last, inside = nodes.index(window[0]), nodes.index(window[-1]), set(window)
    ended = {read for node in nodes[:first] if _name_of(node.target) in OPENING.values() for read in node.args}
    before = [node for node in nodes[:first] if is_region(node)]
    tracking = [node for node in before if node.target is torch._C._set_grad_enabled][-1:]
    opened = [node for node in before if _name_of(node.target) in OPENING and node not in ended]
    between = [node for node in nodes[first : last + 1] if node in inside or is_region(node)]
    return [*tracking, *opened, *between]


def _close_regions(graph: fx.Graph) -> None:
    """End what is left open, the last first."""
    nodes = list(graph.nodes)
    ended = {read for node in nodes if _name_of(node.target) in OPENING.values() for read in node.args}
    for node in reversed(nodes):
        if _name_of(node.target) in OPENING and node not in ended:
            graph.call_function(_EXIT, (node,))
    if any(node.target is torch._C._set_grad_enabled for node in nodes):
        graph.call_function(torch._C._set_grad_enabled, (True,))


def _name_of(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
