"""Backends of torch.compile: compiling without what was kept from before, and finding the one that was used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from floatline.agreement.sides import Around, Side
from floatline.errors import ParityError

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

    def compile(self, plain: Callable[..., Any], around: Around = nullcontext) -> Side:
        """The compiled side of something eager; nothing that was compiled before is used."""
        torch.compiler.reset()
        options = dict(self.options)
        if self.backend == INDUCTOR:
            options = {"fx_graph_cache": False, **options}
        try:
            made = torch.compile(plain, backend=self.backend, options=options or None, dynamic=False)  # pyright: ignore
        except RuntimeError as error:
            reason = str(error).partition(", known options")[0]
            raise ParityError(f"torch.compile refuses this: {reason}. Check backend and options.") from error
        return Side(made, plain, True, around)

    def emulating(self) -> Compiler | None:
        """The same with 16-bit casts where eager code has them; None where the backend is not Inductor."""
        if self.backend != INDUCTOR:
            return None
        return Compiler(self.backend, {**self.options, "emulate_precision_casts": True})


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
