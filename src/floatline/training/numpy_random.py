"""numpy's global random numbers, which a target may use; they count only where numpy has been loaded."""

from __future__ import annotations

import sys
from typing import Any


def seed_numpy(seed: int) -> None:
    """Begin anew; numpy takes 32 bits of the seed."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def numpy_state() -> list[Any] | None:
    """The generator's state as JSON can hold it; None without numpy."""
    if "numpy" not in sys.modules:
        return None
    name, words, place, has_gauss, gauss = sys.modules["numpy"].random.get_state()
    return [str(name), [int(word) for word in words], int(place), int(has_gauss), float(gauss)]


def restore_numpy(state: list[Any] | None) -> None:
    """Go back to what `numpy_state` gave."""
    if state is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state))
