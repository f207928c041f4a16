"""The loss of a captured step as torch.compile computes it, whatever was compiled before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from types import FunctionType
from typing import Any

import torch

from floatline.errors import ReplayError
from floatline.precision.micro_batches import Loss

Backend = bool | str | Callable[..., Any]
"""False compiles nothing, True is Inductor, a name or function another backend of torch.compile."""
NOT_COMPILED = (
    "torch.compile left all of it to eager code, as it does under a dispatch mode, a stance or a switch that "
    "disables it. Leave those out."
)
"""What is said where nothing was compiled: a comparison would only find eager code the same as itself."""


@contextlib.contextmanager
def compile_loss(compute_loss: Callable[[Any], Loss], backend: Backend) -> Generator[Callable[[Any], Loss]]:
    """A loss function, compiled for as long as this lasts; what is given for False is given back.

    Args:
        compute_loss: Gives the loss of a batch.
        backend: What compiles it.

    Raises:
        ReplayError: At the end, where nothing of it was compiled.
    """
    if backend is False:
        yield compute_loss
        return

    def plain(batch: Any) -> Loss:
        return compute_loss(batch)

    # torch.compile keeps what it made by the code, and makes no more of one code than it has room for.
    code = plain.__code__.replace(co_name="compute_loss")
    compute = FunctionType(code, plain.__globals__, closure=plain.__closure__)
    before = count_graphs()
    # Two runs of one step must not draw other random numbers because one of them is compiled.
    options = {"fallback_random": True} if backend in (True, "inductor") else None
    name = "inductor" if backend is True else backend
    yield torch.compile(compute, backend=name, options=options, dynamic=False)  # pyright: ignore
    if count_graphs() == before:
        raise ReplayError(NOT_COMPILED)


def count_graphs() -> int:
    """How many graphs torch.compile has seen in this process, as far as this torch tells."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
