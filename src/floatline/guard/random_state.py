"""RandomState: every random number generator that a step may draw from, as it was, for JSON and back."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The states of Python's, numpy's and torch's global generators.

    Taking one waits for no device.

    Args:
        python: What `random.getstate` gave.
        numpy: What `numpy.random.get_state` gave; None where numpy is not loaded.
        host: Of torch on the CPU.
        cuda: Of torch on each CUDA device; none where CUDA is not in use.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    host: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """The states as they are."""
        numpy = sys.modules.get("numpy")
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        own = None if numpy is None else tuple(numpy.random.get_state())
        return cls(random.getstate(), own, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Go back to them; devices that are not there any more are left out."""
        random.setstate(cast("Any", self.python))
        numpy = sys.modules.get("numpy")
        if self.numpy is not None and numpy is not None:
            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.cuda and torch.cuda.is_available():
            for device, state in list(enumerate(self.cuda))[: torch.cuda.device_count()]:
                torch.cuda.set_rng_state(state, device)

    @contextlib.contextmanager
    def replayed(self) -> Generator[None]:
        """Run something with these states, and then go on as if it had not run."""
        now = RandomState.now()
        try:
            self.restore()
            yield
        finally:
            now.restore()

    def as_parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors, and what JSON can hold."""
        tensors = {"rng.host": self.host, **{f"rng.cuda.{i}": state for i, state in enumerate(self.cuda)}}
        version, words, gauss = self.python
        numpy = self.numpy
        if numpy is not None:
            name, numbers, place, has_gauss, own = numpy
            numpy = (str(name), [int(n) for n in numbers], int(place), int(has_gauss), float(own))
        return tensors, {"python": [version, list(words), gauss], "numpy": None if numpy is None else list(numpy)}

    @classmethod
    def from_parts(cls, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> RandomState:
        """What `as_parts` was called on; KeyError, TypeError or ValueError for anything else."""
        version, words, gauss = state["python"]
        cuda: list[Tensor] = []
        while f"rng.cuda.{len(cuda)}" in tensors:
            cuda.append(tensors[f"rng.cuda.{len(cuda)}"])
        numpy = state["numpy"]
        return cls(
            (int(version), tuple(int(word) for word in words), gauss),
            None if numpy is None else tuple(numpy),
            tensors["rng.host"],
            tuple(cuda),
        )
