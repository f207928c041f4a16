"""The mark of what `make test` leaves to `make test-slow`."""

from collections.abc import Iterable

import pytest

slow = pytest.mark.slow


def mostly_slow(values: Iterable[object], *, every: int, ids: Iterable[str] | None = None) -> list:
    """Values to parametrize a test by, of which one in so many is left to the fast tests.

    Args:
        values: All of them; either suite has its share, and no value is in both.
        every: The last of so many stays fast.
        ids: Their names, where they are no strings.
    """
    values = list(values)
    names = [str(value) for value in values] if ids is None else list(ids)
    return [
        pytest.param(value, id=name, marks=() if number % every == every - 1 else slow)
        for number, (value, name) in enumerate(zip(values, names, strict=True))
    ]
