"""RandomState: every random number generator that a step may draw from, as it was, for files and back."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Generator, Mapping, Sequence
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
        restore_numpy(self.numpy)
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
        return tensors, {"python": _python_fields(self.python), "numpy": _numpy_fields(self.numpy)}

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


def seed_all(seed: int) -> None:
    """Seed every generator; numpy takes 32 bits of the seed, and is seeded only where it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def restore_numpy(state: Sequence[Any] | None) -> None:
    """Take numpy's global generator back, as it is or as JSON held it; nothing where it was not loaded or is not."""
    numpy = sys.modules.get("numpy")
    if state is not None and numpy is not None:
        numpy.random.set_state(tuple(state))


def save_random(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a checkpoint holds of the generators of a process that trains on one device; see `load_random`."""
    now = RandomState.now()
    cuda = {} if device.type != "cuda" else {"rng.cuda": torch.cuda.get_rng_state(device)}
    return {"rng.host": now.host, **cuda}, _fields(now)


def draw_random(device: torch.device, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same for a process that begins from a seed; the generators of this process stay as they are."""
    host = torch.Generator().manual_seed(seed).get_state()
    cuda = {} if device.type != "cuda" else {"rng.cuda": torch.Generator(device).manual_seed(seed).get_state()}
    numpy = sys.modules.get("numpy")
    own = None if numpy is None else tuple(numpy.random.RandomState(seed % 2**32).get_state())
    python = random.Random(seed).getstate()  # noqa: S311 no secret depends on it
    return {"rng.host": host, **cuda}, _fields(RandomState(python, own, host, ()))


def load_random(device: torch.device, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
    """Go back to what `save_random` gave, on whatever device this process trains now.

    A checkpoint of an earlier version does not hold numpy's numbers; they are then left as they are.

    Args:
        device: Where the run trains.
        tensors: The tensors, among others.
        fields: The fields, among others.
    """
    version, words, gauss = fields["python_random"]
    random.setstate((int(version), tuple(words), gauss))
    restore_numpy(fields.get("numpy_random"))
    torch.set_rng_state(tensors["rng.host"])
    if "rng.cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)


def _fields(state: RandomState) -> dict[str, Any]:
    return {"python_random": _python_fields(state.python), "numpy_random": _numpy_fields(state.numpy)}


def _python_fields(state: tuple[Any, ...]) -> list[Any]:
    version, words, gauss = state
    return [version, list(words), gauss]


def _numpy_fields(state: tuple[Any, ...] | None) -> list[Any] | None:
    if state is None:
        return None
    name, numbers, place, has_gauss, gauss = state
    return [str(name), [int(number) for number in numbers], int(place), int(has_gauss), float(gauss)]
