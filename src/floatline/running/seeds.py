"""Seeds: random numbers of a script, begun from a seed before its first line; and whether the script seeds itself."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from floatline.precision.random_state import seed_all
from floatline.precision.user_frames import find_script_line
from floatline.probe.watch.patches import Patches


class Seeds:
    """Begins Python's, numpy's and torch's random numbers from a seed, and hears where a script does so itself.

    Args:
        seed: Of everything; None leaves all as it is.
        shift: What is added to the seeds that the script takes itself.

    Attributes:
        own: Where the script seeds itself, with the seed: 'train.py:12: 1337'.
    """

    def __init__(self, seed: int | None, *, shift: int = 0) -> None:
        self._seed, self._shift = seed, shift
        self.own: list[str] = []

    def begin(self, patches: Patches) -> None:
        """Seed, and listen from then on."""
        if self._seed is not None:
            seed_all(self._seed)
        patches.wrap(torch, "manual_seed", self._listening)
        patches.wrap(torch.random, "manual_seed", self._listening)  # the same by another name
        patches.wrap(random, "seed", self._listening)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            patches.wrap(numpy.random, "seed", self._listening)

    def _listening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if not isinstance(given, int):
                return original(*args, **kwargs)
            spot = find_script_line()
            self.own.append(f"{spot.file}:{spot.line}: {given}")
            return original(given + self._shift)

        return seed
