"""The graphs of code that is run as it is: what it compiles itself, or its model where it compiles nothing."""

# torch shows what it compiles with to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from floatline.agreement.compiled.backends import INDUCTOR, Compiler
from floatline.agreement.compiled.seen_graphs import GraphNotes, SeenGraph
from floatline.probe.watch.patches import CompilerWatch, Patches
from floatline.running.loss_log import EnoughSteps

STEPS = 3
"""Steps that are run: the first fills caches, and weights that begin as zeros have moved by the last."""


class ScriptGraphs:
    """Graphs of the last whole step of a loop, run eagerly instead of compiled code.

    What the loop hands to torch.compile is taken apart by it, and run as it is. A loop that compiles nothing has its
    outermost modules taken apart, where they have weights that are trained.

    Args:
        steps: Steps after which the loop is ended; None lets it run.
    """

    def __init__(self, steps: int | None = STEPS) -> None:
        self._steps = steps
        self._asked: list[GraphNotes] = []
        self._own = GraphNotes()
        self._modules: dict[int, Callable[..., Any]] = {}
        self._inside = False
        self.num_steps = 0

    @property
    def graphs(self) -> list[SeenGraph]:
        """What was seen."""
        return [seen for notes in self._asked or [self._own] for seen in notes.graphs]

    @contextlib.contextmanager
    def seeing(self) -> Generator[None]:
        """See what runs inside."""
        importlib.import_module("torch._dynamo")  # it keeps some of torch's functions as it finds them
        patches = Patches()
        compile_: Callable[..., Any] = cast("Any", torch).compile
        patches.wrap(torch, "compile", self._compiling)
        patches.wrap(nn.Module, "__call__", lambda call: self._calling(call, compile_))
        watch = CompilerWatch((patches,), _nothing)
        hook = register_optimizer_step_post_hook(self._end_step)
        try:
            yield
        finally:
            hook.remove()
            watch.undo()
            patches.undo()

    def _compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile_(model: Any = None, **given: Any) -> Any:
            if given.get("disable") or isinstance(given.get("backend"), GraphNotes):  # a decorator asks twice
                return original(model, **given)
            self._asked.append(GraphNotes(_read_compiler(given)))
            kept = {name: value for name, value in given.items() if name not in ("backend", "mode", "options")}
            return original(model, backend=self._asked[-1], **kept)

        return compile_

    def _calling(self, original: Callable[..., Any], compile_: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or self._asked or not torch.is_grad_enabled() or not _trains(module):
                return original(module, *args, **kwargs)
            if id(module) not in self._modules:

                def run(*args: Any, **kwargs: Any) -> Any:
                    return original(module, *args, **kwargs)

                self._modules[id(module)] = compile_(run, backend=self._own, dynamic=False)
            self._inside = True
            try:
                return self._modules[id(module)](*args, **kwargs)
            finally:
                self._inside = False

        return call

    def _end_step(self, *_: Any) -> None:
        for notes in (*self._asked, self._own):
            notes.end_step()
        self.num_steps += 1
        if self._steps is not None and self.num_steps >= self._steps:
            raise EnoughSteps


@contextlib.contextmanager
def hearing_compilers() -> Generator[list[Compiler]]:
    """Hear what torch.compile is asked for inside; nothing else is changed."""
    heard: list[Compiler] = []
    patches = Patches()

    def listening(original: Callable[..., Any]) -> Callable[..., Any]:
        def compile_(*args: Any, **given: Any) -> Any:
            heard.append(_read_compiler(given))
            return original(*args, **given)

        return compile_

    patches.wrap(torch, "compile", listening)
    try:
        yield heard
    finally:
        patches.undo()


def _trains(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


def _read_compiler(given: Mapping[str, Any]) -> Compiler:
    """The backend that torch.compile was asked for."""
    backend: Any = given.get("backend") or INDUCTOR
    options = dict(given.get("options") or {})
    if given.get("mode") and backend == INDUCTOR:
        options = dict(torch._inductor.list_mode_options(given["mode"]))
    return Compiler(backend, options)


def _nothing() -> None:
    pass
