"""Backends of torch.compile: compiling without what was kept from before, and finding the one that was used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from floatline.agreement.measuring import Measured, measure_pair
from floatline.agreement.sides import Around, Given, Side
from floatline.errors import ParityError
from floatline.probe.steps.compiled_loss import NOT_COMPILED, count_graphs

INDUCTOR = "inductor"


@dataclass(frozen=True)
class Compiler:
    """How something is compiled.

    Args:
        backend: Name or function, as torch.compile takes it.
        options: Options of Inductor, as torch.compile takes them.
    """

    backend: str | Callable[..., Any] = INDUCTOR
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """What it is called."""
        return self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "a backend")

    def compile(self, plain: Callable[..., Any], around: Around = nullcontext) -> Side:
        """The compiled side of something eager; nothing that was compiled before is used."""
        torch.compiler.reset()
        options = dict(self.options)
        if self.backend == INDUCTOR:
            # Inductor draws other random numbers than eager code unless it is told not to.
            options = {"fx_graph_cache": False, "fallback_random": True, **options}
        fresh = _renew(plain) if isinstance(plain, fx.GraphModule) else plain
        try:
            made = torch.compile(fresh, backend=self.backend, options=options or None, dynamic=False)  # pyright: ignore
        except RuntimeError as error:
            reason = str(error).partition(", known options")[0]
            raise ParityError(f"torch.compile refuses this: {reason}. Check backend and options.") from error
        return Side(made, plain, True, around)

    def emulating(self) -> Compiler | None:
        """The same with 16-bit casts where eager code has them; None where the backend is not Inductor."""
        if self.backend != INDUCTOR:
            return None
        return Compiler(self.backend, {**self.options, "emulate_precision_casts": True})


def measure_compiled(
    a: Side,
    compiler: Compiler,
    given: Given,
    *,
    backward: bool = True,
    cotangents: Mapping[str, Tensor] | None = None,
    look: bool = False,
) -> Measured:
    """An eager side against what a backend makes of it; see `measure_pair`.

    Raises:
        ParityError: Nothing of it was compiled, or see `measure_pair`.
    """
    b = compiler.compile(a.plain, a.around)
    before = count_graphs()
    measured = measure_pair(a, b, given, backward=backward, cotangents=cotangents, look=look)
    if count_graphs() == before:
        raise ParityError(NOT_COMPILED)
    return measured


def _renew(graph: fx.GraphModule) -> fx.GraphModule:
    """The same operations as new code: torch.compile leaves alone what has run inside of its own."""
    new = fx.Graph()
    new.output(new.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, new)


def find_compiler(compiled: object) -> Compiler:
    """The backend that a compiled module was made with; Inductor where torch does not tell."""
    found: Any = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    inner = found
    while inner is not None:
        found = inner
        inner = getattr(found, "_torchdynamo_orig_backend", None) or getattr(found, "_torchdynamo_orig_callable", None)
    if found is None or not callable(found):
        return Compiler()
    found = getattr(found, "compiler_fn", found)  # a backend that the user gave, inside torch's own wrapper
    if type(found).__name__ == "_TorchCompileInductorWrapper":
        return Compiler(INDUCTOR, dict(getattr(found, "config", {})))
    return Compiler(found)
