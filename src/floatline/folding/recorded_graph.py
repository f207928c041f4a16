"""Recorded graph: what one forward pass reads and writes, storage by storage, with the range of every value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What attention masks are filled with; a limit of the format, no value of the network.
_MASK = 1e30
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
# Operations whose result has a column for each row of a weight.
_PRODUCTS = ("mm", "addmm", "linear")


class StorageLayout(NamedTuple):
    """Where the numbers of a tensor lie in its storage."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Value(NamedTuple):
    """A tensor as an operation sees it: the storage it lies in, or -1 where it holds no real numbers; and where."""

    node: int
    sixteen: bool
    layout: StorageLayout | None = None

    def of_node(self, node: int) -> Value:
        """The same tensor of another storage."""
        return Value(node, *self[1:])


class WeightPart(NamedTuple):
    """Some places of a parameter along one of its dimensions: one of several matrices that are fused into it."""

    parameter: str
    dim: int
    places: tuple[int, ...]

    def __str__(self) -> str:
        """For people: the parameter, and its first and last places."""
        return f"{self.parameter}, {len(self.places)} places from {self.places[0]} to {self.places[-1]}"


@dataclass
class Node:
    """One storage: everything that views it has the same exponent.

    Attributes:
        kind: Where it comes from.
        name: For people.
        of_weights: Whether it is a parameter, or made of parameters only, as 1 + w is.
        largest: The largest finite magnitude that was in it.
        sixteen: Whether it is in 16 bits where the model is.
        columns: Of the result of a product, the largest magnitude in every column; None where that is not known.
        part: What it is of a fused parameter; None where it is whole.
    """

    kind: Literal["parameter", "buffer", "input", "constant", "made"]
    name: str
    of_weights: bool = False
    largest: float = 0.0
    sixteen: bool = False
    columns: Tensor | None = None
    part: WeightPart | None = None


@dataclass(frozen=True)
class GraphCall:
    """One operation: its arguments with tensors as Values."""

    name: str
    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Value, ...]

    @property
    def place(self) -> str:
        """For people: the operation, and the module that it is in."""
        return f"{self.name} in {self.module or 'the model itself'}"


@dataclass(frozen=True)
class Graph:
    """What a forward pass did.

    Attributes:
        calls: Operations in their order.
        nodes: Storages, by number.
        outputs: Storages of what the model gave.
        eps: The constants of each module whose attribute is named like an epsilon.
        vocabularies: Storages of inputs that are looked up in an embedding, with its number of rows.
    """

    calls: tuple[GraphCall, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    eps: Mapping[str, Mapping[str, float | None]]
    vocabularies: Mapping[int, int]


def record_graph(model: nn.Module, call: Callable[[nn.Module], Any], inputs: Any) -> Graph:
    """Run the model once without gradients and note every operation.

    Args:
        model: The model, in evaluation mode.
        call: Runs it on the inputs.
        inputs: The same inputs, whose tensors are known as such in the graph.
    """
    recorder = _Recorder(model, inputs)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operation for a whole layer would hide what it reads
    try:
        with torch.no_grad(), _module_names(model, recorder.stack), recorder:
            result = call(model)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    outputs = {recorder.node_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
    return Graph(
        tuple(recorder.calls),
        tuple(recorder.nodes),
        tuple(sorted(outputs - {-1})),
        {name: found for name, module in name_modules(model) if (found := find_eps(module))},
        recorder.vocabularies,
    )


def name_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once, with its name."""
    return list(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]


def find_eps(module: nn.Module) -> dict[str, float | None]:
    """Attributes of a module that hold an epsilon, or None for torch's default."""
    named = {name: value for name, value in vars(module).items() if "eps" in name.lower()}
    return {name: value for name, value in named.items() if value is None or isinstance(value, float)}


def mark_sixteen(graph: Graph, low: Graph) -> None:
    """Mark the values that are in 16 bits where the model is.

    Both graphs are of the same model, `low` with its weights in 16 bits. Operations are matched by module, name and
    number; one that has no match, as where a model is written differently for 16 bits, is taken to be in 16 bits.
    """
    matches: dict[tuple[str, str, int], GraphCall] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for call in low.calls:
        matches[call.module, call.name, counts[call.module, call.name]] = call
        counts[call.module, call.name] += 1
    counts.clear()
    for call in graph.calls:
        match = matches.get((call.module, call.name, counts[call.module, call.name]))
        counts[call.module, call.name] += 1
        own = [*values_in((call.args, call.kwargs)), *call.results]
        other = [] if match is None else [*values_in((match.args, match.kwargs)), *match.results]
        for number, value in enumerate(own):
            if value.node >= 0 and (len(other) != len(own) or other[number].sixteen):
                graph.nodes[value.node].sixteen = True
    for node in graph.nodes:
        node.sixteen |= node.kind == "parameter"


def values_in(tree: Any) -> list[Value]:
    """Every tensor among the arguments of a call."""
    return [leaf for leaf in tree_leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Value)) if isinstance(leaf, Value)]


@contextmanager
def _module_names(model: nn.Module, stack: list[str]) -> Generator[None]:
    names = {module: name for name, module in name_modules(model)}

    def enter(module: nn.Module, _args: Any) -> None:
        stack.append(names.get(module, stack[-1]))

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        stack.pop()

    handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(TorchDispatchMode):
    """Notes every operation; storages are held weakly, so that their memory is free as soon as without the recorder."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.calls: list[GraphCall] = []
        self.nodes: list[Node] = []
        self.stack: list[str] = [""]
        self.vocabularies: dict[int, int] = {}
        # A weak reference keeps the storage's address from being used again, so it names the storage.
        self._homes: dict[StorageWeakRef, int] = {}
        for name, parameter in model.named_parameters():
            self._add(parameter, "parameter", name)
        for name, buffer in model.named_buffers():
            self._add(buffer, "buffer", name)
        for number, leaf in enumerate(tree_leaves(inputs)):
            if isinstance(leaf, Tensor):
                self._add(leaf, "input", f"input {number}")

    def node_of(self, tensor: Tensor) -> int:
        """Number of the storage of a tensor of real numbers; -1 for others."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return -1
        return self._home(tensor, "constant", f"a constant in {self.stack[-1] or 'the model itself'}")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operation and note it; torch calls this."""
        del types
        kwargs = kwargs or {}
        name = str(func.overloadpacket).removeprefix("aten.")
        if name == "embedding":
            self._note_vocabulary(args)
        noted: tuple[Any, Any] = tree_map(self._value, (args, kwargs))
        result = func(*args, **kwargs)
        written: list[Tensor] = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        read = [value.node >= 0 and self.nodes[value.node].of_weights for value in values_in(noted)]
        results = tuple(self._written(tensor, bool(read) and all(read)) for tensor in written)
        self.calls.append(GraphCall(name, self.stack[-1], noted[0], noted[1], results))
        for value, tensor in zip(results, written, strict=True):
            if value.node >= 0 and (name in _PRODUCTS or name.endswith("_")):
                # What is written to in place has other numbers now.
                self.nodes[value.node].columns = _largest_columns(tensor) if name in _PRODUCTS else None
        return result

    def _value(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return Value(self.node_of(leaf), leaf.dtype in _SIXTEEN_BITS, _find_layout(leaf))

    def _written(self, tensor: Tensor, of_weights: bool) -> Value:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return Value(-1, False)
        number = self._home(tensor, "made", f"made in {self.stack[-1] or 'the model itself'}")
        self.nodes[number].largest = max(self.nodes[number].largest, find_largest(tensor))
        self.nodes[number].of_weights = of_weights
        return Value(number, tensor.dtype in _SIXTEEN_BITS, _find_layout(tensor))

    def _home(self, tensor: Tensor, kind: Literal["constant", "made"], name: str) -> int:
        found = self._homes.get(StorageWeakRef(tensor.untyped_storage()))
        return self._add(tensor, kind, name) if found is None else found

    def _add(self, tensor: Tensor, kind: Any, name: str) -> int:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference not in self._homes:
            self._homes[reference] = len(self.nodes)
            largest = find_largest(tensor) if kind == "parameter" else 0.0
            self.nodes.append(Node(kind, name, kind == "parameter", largest))
        return self._homes[reference]

    def _note_vocabulary(self, args: tuple[Any, ...]) -> None:
        home = self._homes.get(StorageWeakRef(args[1].untyped_storage()))
        if home is not None and self.nodes[home].kind == "input":
            self.vocabularies[home] = min(args[0].shape[0], self.vocabularies.get(home, args[0].shape[0]))


def _find_layout(tensor: Tensor) -> StorageLayout | None:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return None
    return StorageLayout(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _largest_columns(tensor: Tensor) -> Tensor | None:
    if tensor.dim() < 2 or not tensor.numel():
        return None
    return tensor.detach().abs().flatten(0, -2).amax(0).float().cpu()


def find_largest(tensor: Tensor) -> float:
    """The largest finite magnitude; what fills attention masks does not count."""
    if not tensor.numel():
        return 0.0
    sizes = tensor.detach().abs().float()
    largest = sizes.max().item()
    if math.isfinite(largest) and largest < _MASK:
        return largest
    left = sizes[sizes < _MASK]
    return left.max().item() if left.numel() else 0.0
