"""Backends of torch.compile that are wrong, each in one way, on the graph that Dynamo hands them."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx


def folds_wrongly(graph: fx.GraphModule, _examples: Any) -> Any:
    """(x + c) * s becomes x * s + c: constants that are moved past each other."""
    for node in _calls(graph, operator.mul, torch.mul):
        inner, factor = node.args
        if isinstance(factor, int | float) and inner.target in (operator.add, torch.add):
            shift = inner.args[1]
            with graph.graph.inserting_after(node):
                moved = graph.graph.call_function(operator.add, (node, shift))
            node.replace_all_uses_with(moved, delete_user_cb=lambda user, moved=moved: user is not moved)
            node.replace_input_with(inner, inner.args[0])
    return _done(graph)


def drops_a_relu(graph: fx.GraphModule, _examples: Any) -> Any:
    """The second of all relus is left out."""
    for number, node in enumerate(_calls(graph, F.relu, torch.relu)):
        if number == 1:
            node.replace_all_uses_with(node.args[0])
    return _done(graph)


def _add_narrow(x: Any, y: Any) -> Any:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.dtype == y.dtype:
        return x + y
    narrow = min(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)
    return (x.to(narrow) + y.to(narrow)).to(torch.promote_types(x.dtype, y.dtype))


def promotes_wrongly(graph: fx.GraphModule, _examples: Any) -> Any:
    """FP32 and 16 bits are added in 16 bits."""
    for node in _calls(graph, operator.add, torch.add):
        node.target = _add_narrow
    return _done(graph)


def keeps_old_buffers(graph: fx.GraphModule, _examples: Any) -> Any:
    """Buffers are read the first time only, and never written."""
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    kept: dict[str, Tensor] = {}

    def run(*values: Any) -> Any:
        given = list(values)
        for place, name in enumerate(names):
            if "buffers" in name and isinstance(given[place], Tensor):
                given[place] = kept.setdefault(name, given[place].clone()).clone()
        return graph(*given)

    return run


def drops_a_cast(graph: fx.GraphModule, _examples: Any) -> Any:
    """16 bits that are to be widened stay 16 bits."""
    for node in list(graph.graph.nodes):
        if node.op == "call_method" and node.target == "float":
            node.replace_all_uses_with(node.args[0])
    return _done(graph)


def sums_another_axis(graph: fx.GraphModule, _examples: Any) -> Any:
    """A softmax over the last axis runs over the one before."""
    for node in list(graph.graph.nodes):
        if node.target == "softmax" and node.args[1:] == (-1,):
            node.args = (node.args[0], -2)
        elif node.target in (torch.softmax, F.softmax) and node.kwargs.get("dim") == -1:
            node.kwargs = {**node.kwargs, "dim": -2}
    return _done(graph)


def _calls(graph: fx.GraphModule, *targets: Any) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function" and node.target in targets]


def _done(graph: fx.GraphModule) -> Any:
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph.forward
