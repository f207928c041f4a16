"""Fused weights: a matrix that holds several in one (gate and up, queries and keys and values), seen as its parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from floatline.folding.recorded_graph import Graph, GraphCall, Node, StorageLayout, Value, WeightPart, values_in

# The arguments of a product that are a matrix and what is added to the result; the last one may be left out.
_FACTORS = {"mm": (1, None), "addmm": (2, 0), "linear": (1, 2)}
_VIEWS = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "unsqueeze", "slice"),
    *("squeeze", "select", "split", "split_with_sizes", "chunk", "unbind", "alias", "detach", "narrow", "as_strided"),
}
_Columns = frozenset[int]


@dataclass(frozen=True)
class _WeightProduct:
    """A call that multiplies by a parameter and writes a storage of its own, row by row."""

    call: GraphCall
    result: int
    width: int
    matrix: Value
    bias: Value | None


def split_fused(graph: Graph, model: nn.Module) -> Graph:
    """A graph in which parts of a product's result that are read apart are values of their own.

    A storage has one exponent, so gate and up in one matrix would be scaled together. Here the columns of a product's
    result are put into classes: those that one operation reads together are in one. The rows of the matrix, and of its
    bias, are parted in the same way, and the product becomes one for each part.

    Args:
        graph: What the model reads and writes.
        model: The model, whose weights are measured by their parts.
    """
    products = _find_products(graph)
    readers = _find_readers(graph, products)
    classes = {one.result: _find_classes(graph, one, readers[one.result]) for one in products}
    parts = _find_parts(graph, products, classes, dict(model.named_parameters()))
    split = {node: found for node, found in classes.items() if len(found) > 1}
    if not parts or not split:
        return graph
    nodes = list(graph.nodes)
    made = {node: _add_classes(nodes, node, found) for node, found in split.items()}
    cut = {node: _add_parts(nodes, node, found) for node, found in parts.items()}
    homes = {id(one.call): one for one in products}
    widths = {one.result: one.width for one in products}
    calls: list[GraphCall] = []
    for call in graph.calls:
        if id(call) in homes:
            calls += _cut_product(homes[id(call)], made, cut)
        elif (viewed := _find_viewed(call)) not in made and viewed not in cut:
            calls.append(_with_classes(call, made, widths))
    return replace(graph, calls=tuple(calls), nodes=tuple(nodes))


def _find_products(graph: Graph) -> list[_WeightProduct]:
    found: list[_WeightProduct] = []
    for call in graph.calls:
        places = _FACTORS.get(call.name)
        if places is None or not call.results:
            continue
        matrix = _parameter(graph, call, places[0], 2)
        bias = None if places[1] is None else _parameter(graph, call, places[1], 1)
        result = call.results[0]
        width = _row_width(result.layout)
        if matrix is not None and width and graph.nodes[result.node].kind == "made":
            found.append(_WeightProduct(call, result.node, width, matrix, bias))
    written = Counter(one.result for one in found)
    return [one for one in found if written[one.result] == 1]


def _parameter(graph: Graph, call: GraphCall, place: int, dims: int) -> Value | None:
    value = call.args[place] if place < len(call.args) else None
    if not isinstance(value, Value) or value.node < 0 or value.layout is None or len(value.layout.sizes) != dims:
        return None
    return value if graph.nodes[value.node].kind == "parameter" else None


def _row_width(layout: StorageLayout | None) -> int:
    """How many numbers a row of a whole storage has; 0 where the tensor is none."""
    if layout is None or layout.offset or len(layout.sizes) < 2:
        return 0
    expected = 1
    for size, stride in zip(reversed(layout.sizes), reversed(layout.strides), strict=True):
        if stride != expected and size != 1:
            return 0
        expected *= size
    return layout.sizes[-1]


def _find_readers(graph: Graph, products: Sequence[_WeightProduct]) -> dict[int, set[Value]]:
    """How each storage is read or written by operations that do more than view it."""
    made = {id(one.call): one.result for one in products}
    found: dict[int, set[Value]] = defaultdict(set)
    for call in graph.calls:
        aside = (made.get(id(call)), _find_viewed(call))
        for value in (*values_in((call.args, call.kwargs)), *call.results):
            if value.node not in aside:
                found[value.node].add(value)
    return found


def _find_classes(graph: Graph, one: _WeightProduct, readers: Iterable[Value]) -> list[_Columns]:
    """Columns of a product's result, in classes that no operation reads together."""
    every = frozenset(range(one.width))
    if one.result in graph.outputs:
        return [every]
    classes: list[_Columns] = []
    for value in readers:
        merged = _columns(value.layout, one.width)
        if not merged:  # a slice of no columns, as of a rotary embedding that turns all of them
            continue
        apart = [found for found in classes if not found & merged]
        for found in classes:
            merged |= found if found & merged else frozenset()
        classes = [*apart, merged]
    rest = every - frozenset[int]().union(*classes)
    return sorted([*classes, *([rest] if rest else [])], key=min)


def _find_viewed(call: GraphCall) -> int | None:
    """The storage that a call gives another view of, where it does nothing else."""
    first = call.args[0] if call.args else None
    if call.name not in _VIEWS or not isinstance(first, Value):
        return None
    return first.node if all(value.node == first.node for value in call.results) else None


def _columns(layout: StorageLayout | None, width: int) -> _Columns:
    """Columns of a storage that a view of it reads; all of them where that is not known."""
    if layout is None:
        return frozenset(range(width))
    steps = [(size, stride) for size, stride in zip(layout.sizes, layout.strides, strict=True) if stride % width]
    found: set[int] = {layout.offset % width}
    for size, stride in steps:
        found = {(column + place * stride) % width for column in found for place in range(size)}
    return frozenset(found)


def _find_parts(
    graph: Graph,
    products: Sequence[_WeightProduct],
    classes: Mapping[int, list[_Columns]],
    parameters: Mapping[str, nn.Parameter],
) -> dict[int, list[tuple[WeightPart, float]]]:
    """Parts of every parameter that is only ever a factor, or what is added, of products whose classes they follow."""
    cuts: dict[int, set[tuple[int, tuple[_Columns, ...]]]] = defaultdict(set)
    used: Counter[int] = Counter()
    for one in products:
        for value, dim in ((one.matrix, 0 if one.call.name == "linear" else 1), (one.bias, 0)):
            place = None if value is None else _dim_of(value, dim, parameters[graph.nodes[value.node].name])
            if value is not None and place is not None:
                cuts[value.node].add((place, tuple(classes[one.result])))
                used[value.node] += 1
    uses: Counter[int] = Counter()
    for call in graph.calls:
        viewed = _find_viewed(call)
        uses.update(value.node for value in values_in((call.args, call.kwargs)) if value.node != viewed)
    found: dict[int, list[tuple[WeightPart, float]]] = {}
    for node, ways in cuts.items():
        dims, name = {place for place, _ in ways}, graph.nodes[node].name
        parts = _refine(one for _, several in ways for one in several)
        if len(dims) > 1 or used[node] != uses[node] or len(parts) < 2:
            continue
        dim = dims.pop()
        rows = parameters[name].detach().abs().float().movedim(dim, 0)
        sizes = rows.reshape(rows.shape[0], -1).amax(1)
        found[node] = [(WeightPart(name, dim, part), float(sizes[list(part)].max())) for part in parts]
    return found


def _refine(columns: Iterable[_Columns]) -> list[tuple[int, ...]]:
    """The coarsest classes that each of the given ones is made of."""
    marks: dict[int, list[int]] = defaultdict(list)
    for number, several in enumerate(columns):
        for column in several:
            marks[column].append(number)
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for column, numbers in sorted(marks.items()):
        found[tuple(numbers)].append(column)
    return [tuple(part) for part in found.values()]


def _dim_of(value: Value, dim: int, parameter: Tensor) -> int | None:
    """The dimension of a parameter that a dimension of a view of it runs along, from end to end."""
    layout = value.layout
    if layout is None:
        return None
    size, stride = layout.sizes[dim], layout.strides[dim]
    for own in range(parameter.dim()):
        if parameter.shape[own] == size and parameter.stride(own) == stride and (layout.offset // stride) % size == 0:
            return own
    return None


def _add_classes(nodes: list[Node], node: int, classes: Sequence[_Columns]) -> list[tuple[_Columns, int]]:
    """A new node for each class of columns."""
    found: list[tuple[_Columns, int]] = []
    for columns in classes:
        own = nodes[node].columns
        largest = nodes[node].largest if own is None else float(own[sorted(columns)].max())
        found.append((columns, len(nodes)))
        nodes.append(replace(nodes[node], largest=largest, columns=None))
    return found


def _add_parts(nodes: list[Node], node: int, parts: Sequence[tuple[WeightPart, float]]) -> list[tuple[_Columns, int]]:
    """A new node for each part of a parameter."""
    found: list[tuple[_Columns, int]] = []
    for part, largest in parts:
        found.append((frozenset(part.places), len(nodes)))
        nodes.append(replace(nodes[node], name=str(part), largest=largest, part=part))
    return found


def _cut_product(
    one: _WeightProduct,
    made: Mapping[int, list[tuple[_Columns, int]]],
    cut: Mapping[int, list[tuple[_Columns, int]]],
) -> list[GraphCall]:
    """The product as one call for each part of its result and of its weights."""
    results = made.get(one.result, [(frozenset(range(one.width)), one.result)])
    calls: list[GraphCall] = []
    for columns, result in results:
        matrices = _overlapping(cut, one.matrix, columns)
        biases = [-1] if one.bias is None else _overlapping(cut, one.bias, columns)
        for matrix, bias in product(matrices, biases):
            names = {one.matrix: one.matrix.of_node(matrix)}
            if one.bias is not None:
                names[one.bias] = one.bias.of_node(bias)
            args = _rename(one.call.args, names)
            calls.append(replace(one.call, args=args, results=(one.call.results[0].of_node(result),)))
    return calls


def _overlapping(cut: Mapping[int, list[tuple[_Columns, int]]], value: Value, columns: _Columns) -> list[int]:
    return [part for own, part in cut[value.node] if own & columns] if value.node in cut else [value.node]


def _with_classes(
    call: GraphCall, made: Mapping[int, list[tuple[_Columns, int]]], widths: Mapping[int, int]
) -> GraphCall:
    """A call whose arguments and results are classes instead of the storages that hold several."""

    def rename(leaf: Any) -> Any:
        if not isinstance(leaf, Value) or leaf.node not in made:
            return leaf
        own = _columns(leaf.layout, widths[leaf.node])
        return leaf.of_node(next(number for columns, number in made[leaf.node] if own <= columns))

    args, kwargs, results = tree_map(rename, (call.args, call.kwargs, call.results), is_leaf=_is_value)
    return replace(call, args=args, kwargs=kwargs, results=results)


def _rename(args: Any, names: Mapping[Value, Value]) -> Any:
    def rename(leaf: Any) -> Any:
        return names.get(leaf, leaf) if isinstance(leaf, Value) else leaf

    return tree_map(rename, args, is_leaf=_is_value)


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)
