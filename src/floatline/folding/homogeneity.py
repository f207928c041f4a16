"""Homogeneity: how the result of each operation scales when its arguments are scaled by powers of two."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from floatline.folding.recorded_graph import Graph, GraphCall, Value, values_in

# A storage by its number, an epsilon by ("eps", module, attribute), a shifted parameter by ("shift", storage, number).
Unknown = Hashable


class Relation(NamedTuple):
    """A sum of exponents that must be zero, and what asks for it."""

    terms: Mapping[Unknown, Fraction | int]
    why: str


def relate(graph: Graph, eps_of: Callable[[str, str], Unknown] | None = None) -> list[Relation]:
    """Every relation between the exponents of a graph.

    A set of exponents that meets all of them leaves the outputs as they are: each operation then gives what it gave,
    times a power of two. An operation that is not known here asks for its arguments as they are, which is always right.

    Args:
        graph: What the model reads and writes.
        eps_of: The unknown of a module's epsilon, where several modules take theirs from one setting.
    """
    relations = [Relation({number: 1}, _fixed(graph, number)) for number in range(len(graph.nodes))]
    relations = [one for number, one in enumerate(relations) if graph.nodes[number].kind not in ("parameter", "made")]
    relations += [Relation({number: 1}, "it is an output of the model") for number in graph.outputs]
    for call in graph.calls:
        context = _Context(graph, call, eps_of)
        for terms in _find_rule(call.name)(context):
            merged: dict[Unknown, Fraction | int] = {}
            for unknown, factor in terms:
                merged[unknown] = merged.get(unknown, 0) + factor
            relations.append(Relation(merged, context.why))
    return relations


def _find_rule(name: str) -> Rule:
    """The rule of an operation, or of the one that it does in place."""
    return RULES.get(name, RULES.get(name.removesuffix("_"), _as_it_is))


def _fixed(graph: Graph, number: int) -> str:
    node = graph.nodes[number]
    return f"it is the {node.kind} {node.name}" if node.kind == "buffer" else f"it is {node.name}"


Terms = Iterable[tuple[Unknown, Fraction | int]]


class _Context:
    """One call, and what its rule may ask."""

    def __init__(self, graph: Graph, call: GraphCall, eps_of: Callable[[str, str], Unknown] | None) -> None:
        self.graph, self.call, self._eps_of = graph, call, eps_of
        self.args, self.kwargs = call.args, call.kwargs
        self.why = call.place

    def node(self, place: int) -> int | None:
        """The storage of an argument, or None where it holds no real numbers."""
        value = self.args[place] if place < len(self.args) else None
        return value.node if isinstance(value, Value) and value.node >= 0 else None

    def result(self, place: int = 0) -> int | None:
        values = self.call.results
        return values[place].node if place < len(values) and values[place].node >= 0 else None

    def read(self) -> list[int]:
        """Storages of all arguments."""
        return [value.node for value in values_in((self.args, self.kwargs)) if value.node >= 0]

    def written(self) -> list[int]:
        return [value.node for value in self.call.results if value.node >= 0]

    def eps(self, number: float) -> Unknown | None:
        """The attribute of the module that holds a constant, as an unknown."""
        for name, value in self.graph.eps.get(self.call.module, {}).items():
            held = 2.0**-23 if value is None else value
            if math.isclose(held, number, rel_tol=1e-6):
                own = ("eps", self.call.module, name)
                return own if self._eps_of is None else self._eps_of(self.call.module, name)
        return None


Rule = Callable[[_Context], list[Terms]]


def _as_it_is(context: _Context) -> list[Terms]:
    return [[(node, 1)] for node in (*context.read(), *context.written())]


def _nothing(context: _Context) -> list[Terms]:
    del context
    return []


def _equal(*nodes: Unknown | None) -> list[Terms]:
    found = [node for node in nodes if node is not None]
    return [[(found[0], 1), (node, -1)] for node in found[1:]]


def _same(context: _Context) -> list[Terms]:
    return _equal(*context.read(), *context.written())


def _same_unless_scalar(context: _Context) -> list[Terms]:
    """Same exponents, where numbers among the arguments are 0 or infinite: those have every scale."""
    numbers = [value for value in context.args if isinstance(value, int | float) and not isinstance(value, bool)]
    return _same(context) if all(one == 0 or math.isinf(one) for one in numbers) else _as_it_is(context)


def _power(factor: Fraction | int) -> Rule:
    def rule(context: _Context) -> list[Terms]:
        x, out = context.node(0), context.result()
        return [[(out, 1), (x, -factor)]] if x is not None and out is not None else []

    return rule


def _to_power(context: _Context) -> list[Terms]:
    number = context.args[1]
    if isinstance(number, int | float) and float(number * 2).is_integer():
        return _power(Fraction(number))(context)
    return _as_it_is(context)


def _product(x: int, y: int, added: int | None = None, sign: int = 1) -> Rule:
    """The result is argument x times argument y (or divided by it), plus an argument of the same scale."""

    def rule(context: _Context) -> list[Terms]:
        if context.kwargs.get("rounding_mode"):
            return _as_it_is(context)
        out = context.result()
        if out is None:
            return _as_it_is(context)
        factors = ((context.node(x), 1), (context.node(y), sign))
        found: list[Terms] = [[(out, -1), *((node, factor) for node, factor in factors if node is not None)]]
        known = {context.node(x), context.node(y)}
        if added is not None and context.kwargs.get("beta", 1) == 0:
            known.add(context.node(added))
        return found + _equal(out, *(node for node in context.read() if node not in known))

    return rule


def _number(context: _Context) -> float | None:
    """The number that a tensor is added to."""
    numbers = [value for value in context.args[:2] if isinstance(value, int | float)]
    return float(numbers[0]) * context.kwargs.get("alpha", 1) if numbers else None


def _sum(context: _Context) -> list[Terms]:
    number, nodes = _number(context), [context.node(0), context.node(1)]
    tensors = [value for value in context.args[:2] if isinstance(value, Value)]
    if any(value.node < 0 for value in tensors):
        return _as_it_is(context)  # whole numbers are added
    if number is None or number == 0:
        return _equal(*nodes, context.result())
    x = next(node for node in nodes if node is not None)
    if (eps := context.eps(number)) is not None:
        return [*_equal(x, context.result()), [(x, 1), (eps, -1)]]
    if context.graph.nodes[x].kind == "parameter" and x != context.result() and context.call.name == "add":
        return _equal(("shift", x, number), context.result())
    context.why += f" adds {number:g}"
    return _as_it_is(context)


def _norm(weight: int, bias: int | None, eps: int) -> Rule:
    """Layer, group and RMS norm: the result has the scale of weight and bias, whatever was read."""

    def rule(context: _Context) -> list[Terms]:
        x, out = context.node(0), context.result()
        if x is None or out is None:
            return _as_it_is(context)
        gain = context.node(weight) if weight >= 0 else None
        shift = None if bias is None else context.node(bias)
        found: list[Terms] = [[(out, 1)]] if gain is None else _equal(out, gain)
        found += _equal(out, shift)
        number = context.args[eps] if eps < len(context.args) else None
        number = 2.0**-23 if number is None else number
        held = context.eps(number)
        context.why += "" if held else f" has an epsilon of {number:g} that no attribute of the module holds"
        found.append([(x, 1)] if held is None else [(held, 1), (x, -2)])
        *means, deviation = [value.node for value in context.call.results[1:]] or [-1]
        found += [[(node, 1), (x, -1)] for node in means if node >= 0]
        found += [[(deviation, 1), (x, 1)]] if deviation >= 0 else []  # one over the deviation
        return found

    return rule


def _attention(context: _Context) -> list[Terms]:
    query, key, value = (context.node(place) for place in range(3))
    named = {query, key, value}
    found: list[Terms] = [[(query, 1), (key, 1)], *_equal(context.result(), value)]
    found += [[(node, 1)] for node in context.read() if node not in named]
    return found + [[(node, 1)] for node in context.written()[1:]]


def _variance(context: _Context) -> list[Terms]:
    x, outs = context.node(0), context.written()
    found: list[Terms] = [[(outs[0], 1), (x, -2)]]
    return found + [[(node, 1), (x, -1)] for node in outs[1:]]


def _filled(context: _Context) -> list[Terms]:
    numbers = [value for value in context.args if isinstance(value, int | float) and not isinstance(value, bool)]
    return [] if numbers and all(one == 0 for one in numbers) else [[(node, 1)] for node in context.written()]


def _pinned_result(context: _Context) -> list[Terms]:
    return [[(node, 1)] for node in context.written()]


def _scattered(context: _Context) -> list[Terms]:
    number = context.args[3] if len(context.args) > 3 else 0
    return _as_it_is(context) if isinstance(number, int | float) and number != 0 else _same(context)


def _embedding(context: _Context) -> list[Terms]:
    return _equal(context.node(0), context.result())


def _converted(context: _Context) -> list[Terms]:
    return _same(context) if context.written() else _as_it_is(context)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("cat", "stack", "clone", "copy", "contiguous", "index", "index_select", "gather", "repeat", "roll"),
            *("flip", "neg", "relu", "leaky_relu", "abs", "sum", "mean", "amax", "amin", "max", "min", "cumsum"),
            *("topk", "sort", "index_put", "_index_put_impl", "index_add", "index_copy", "scatter_add"),
            *("masked_scatter", "maximum", "minimum", "linalg_vector_norm", "norm", "pixel_shuffle", "im2col"),
            *("avg_pool2d", "_adaptive_avg_pool2d", "max_pool2d_with_indices", "upsample_nearest1d"),
            *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"),
            *(
                "reflection_pad1d",
                "reflection_pad2d",
                "replication_pad2d",
                "tril",
                "triu",
                "diagonal",
                "repeat_interleave",
            ),
            *("view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "unsqueeze"),
            *("squeeze", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "as_strided", "alias"),
            *("detach", "unfold", "narrow", "view_as_real", "view_as_complex", "real", "lift_fresh"),
        ),
        _same,
    ),
    **dict.fromkeys(("where", "masked_fill", "constant_pad_nd", "clamp", "clamp_min"), _same_unless_scalar),
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne"), _same_unless_scalar),
    **dict.fromkeys(
        (
            *("isnan", "isinf", "isfinite", "argmax", "argmin", "argsort", "any", "nonzero", "zero"),
            *("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "empty_strided"),
            *("new_empty_strided", "_has_compatible_shallow_copy_type", "is_same_size"),
        ),
        _nothing,
    ),
    **dict.fromkeys(("full", "full_like", "new_full", "fill"), _filled),
    "sign": _pinned_result,
    "scatter": _scattered,
    "_to_copy": _converted,
    "embedding": _embedding,
    **dict.fromkeys(("add", "sub"), _sum),
    **dict.fromkeys(("mul", "mm", "bmm", "mv", "dot", "matmul", "_grouped_mm"), _product(0, 1)),
    "div": _product(0, 1, sign=-1),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addcmul", "addbmm"), _product(1, 2, added=0)),
    "addcdiv": _product(1, 2, added=0, sign=-1),
    **dict.fromkeys(("convolution", "linear"), _product(0, 1, added=2)),
    "pow": _to_power,
    "square": _power(2),
    "sqrt": _power(Fraction(1, 2)),
    "rsqrt": _power(Fraction(-1, 2)),
    "reciprocal": _power(-1),
    **dict.fromkeys(("var", "var_mean"), _variance),
    "native_layer_norm": _norm(2, 3, 4),
    "native_group_norm": _norm(1, 2, 7),
    "_fused_rms_norm": _norm(2, None, 3),
    **dict.fromkeys(
        (
            *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
            *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
            *("_scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention"),
        ),
        _attention,
    ),
}
