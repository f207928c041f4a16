"""The graphs that torch.compile takes out of a step, run eagerly, with what each was called with."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from floatline.agreement.compiled.backends import Compiler
from floatline.agreement.sides import Given
from floatline.precision.dtypes import NARROW
from floatline.precision.user_frames import is_users
from floatline.probe.steps.other_precision import AutocastState

_MOST_GRAPHS = 32
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_WORD = re.compile(r"\['([^']+)'\]|\.(\w+)")
_NARROW = re.compile(r"float16|bfloat16|\.half\(")
_CONTAINERS = ("_modules", "_parameters", "_buffers")


@dataclass
class SeenGraph:
    """A graph, and what it was called with last.

    Args:
        graph: Its operations, in FX.
        input_names: What the inputs are called in the user's modules.
        values: The inputs.
        autocast: Autocast around it.
        compiler: What it was to be compiled with.
        cotangents: Gradients of its outputs, by the names that a run of it uses; none where nothing went backward.
    """

    graph: fx.GraphModule
    input_names: tuple[str, ...]
    values: tuple[Any, ...]
    autocast: AutocastState
    compiler: Compiler = field(default_factory=Compiler)
    cotangents: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def given(self) -> Given:
        """The inputs as arguments."""
        return Given(self.values)

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast as it was."""
        return self.autocast.replayed()

    @property
    def may_be_narrow(self) -> bool:
        """Whether it may compute in 16 bits, by its inputs, its casts and autocast."""
        narrow = any(isinstance(value, Tensor) and value.dtype in NARROW for value in self.values)
        return narrow or any(on for on, _ in self.autocast.devices.values()) or bool(_NARROW.search(self.graph.code))

    @property
    def computes(self) -> bool:
        """Whether it has an operation that gives something."""
        return any(is_operation(node) for node in self.graph.graph.nodes)


class GraphNotes:
    """A backend of torch.compile that runs graphs as they are, and keeps what they were last called with.

    Args:
        compiler: What the graphs were to be compiled with.
        tracked: Whether only calls with gradients are kept.
    """

    def __init__(self, compiler: Compiler | None = None, *, tracked: bool = True) -> None:
        self.compiler, self._tracked = compiler or Compiler(), tracked
        self._now: dict[int, SeenGraph] = {}
        self._last: dict[int, SeenGraph] = {}

    def __call__(self, graph: fx.GraphModule, _examples: Sequence[Any]) -> Callable[..., Any]:
        """Take a graph; torch.compile calls this."""
        own = fx.GraphModule(graph, graph.graph)  # what Dynamo made itself it would not compile once more
        names = tuple(name_input(node) for node in graph.graph.nodes if node.op == "placeholder")

        def run(*values: Any) -> Any:
            wanted = torch.is_grad_enabled() or not self._tracked
            wanted = wanted and (id(own) in self._now or len(self._now) < _MOST_GRAPHS)
            held = tuple(_copy(value) for value in values) if wanted else ()
            seen = SeenGraph(own, names, held, AutocastState.now(), self.compiler) if wanted else None
            made = own(*values)
            if seen is not None:
                self._now[id(own)] = seen
                _keep_gradients(made, seen)
            return made

        return run

    def end_step(self) -> None:
        """A step is over: what comes now belongs to another."""
        if any(seen.cotangents for seen in self._now.values()):
            self._last, self._now = self._now, {}

    @property
    def graphs(self) -> list[SeenGraph]:
        """Those of the last whole step, in the order in which they were called."""
        self.end_step()
        return [seen for seen in (self._last or self._now).values() if seen.computes]


def _keep_gradients(made: Any, seen: SeenGraph) -> None:
    outputs = cast("Sequence[Any]", made) if isinstance(made, tuple | list) else (made,)
    for place, output in enumerate(outputs):
        if isinstance(output, Tensor) and output.requires_grad and output.is_floating_point():
            name = f"output[{place}]"

            def keep(gradient: Tensor, name: str = name) -> None:
                seen.cotangents[name] = gradient.detach().clone()

            output.register_hook(keep)  # pyright: ignore[reportUnknownMemberType]


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    return copied.requires_grad_(value.requires_grad) if copied.is_floating_point() else copied


def name_input(node: fx.Node) -> str:
    """'blocks.0.weight' for a weight or buffer, the variable for anything else; its name in the graph at worst."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name: Any = getattr(source, "name", "")
    text = str(name() if callable(name) else name)
    words = [key or attribute for key, attribute in _WORD.findall(text)]
    first = next((place for place, word in enumerate(words) if word in _CONTAINERS), None)
    if first is None:
        return words[-1] if words else node.name
    return ".".join(word for word in words[first:] if word not in _CONTAINERS)


def find_module(node: fx.Node, graph: fx.GraphModule) -> tuple[str, str]:
    """Name and class of the innermost module that a node belongs to; '' and '' where none is known.

    Args:
        node: A node.
        graph: The whole graph: what all of its modules lie in is no part of a name.
    """
    stack = _modules_of(node)
    if not stack:
        return "", ""
    tops = [_words(found[0][0]) for one in graph.graph.nodes if (found := _modules_of(one))]
    shared = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*tops, strict=False))
    path, kind = stack[-1]
    return ".".join(_words(path)[len(list(shared)) :]), getattr(kind, "__name__", str(kind).rpartition(".")[2])


def _modules_of(node: fx.Node) -> list[tuple[str, Any]]:
    """The modules that a node lies in, from the outermost, as torch.compile names them."""
    stack = cast("dict[str, tuple[object, Any]]", node.meta.get("nn_module_stack") or {})
    return [(str(path), kind) for path, kind in stack.values()]


def _words(path: str) -> list[str]:
    """A path such as "L['self'].middle._modules['0']" in words: self, middle, 0."""
    words = [key or attribute for key, attribute in _WORD.findall(path)]
    return [word for word in words if word not in _CONTAINERS]


def is_operation(node: fx.Node) -> bool:
    """Whether a node computes something; regions of autocast and gradients only begin and end."""
    return node.op.startswith("call_") and not is_region(node)


def is_region(node: fx.Node) -> bool:
    """Whether a node begins or ends a region."""
    return getattr(node.target, "__name__", "") in (*OPENING, *OPENING.values(), "_set_grad_enabled")


OPENING = {"_enter_autocast": "_exit_autocast"}
"""What begins a region, and what ends it."""


def find_line(node: fx.Node) -> tuple[str, int]:
    """The user's innermost line that a node comes from; '' and 0 where none is known."""
    frames = [(file, int(line)) for file, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
    own = [(file, line) for file, line in frames if is_users(file) and Path(file).exists()]
    return own[-1] if own else ("", 0)
