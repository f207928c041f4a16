"""The marks of what `make test` leaves to `make test-slow`, and both to `make test-exhaustive`."""

from collections.abc import Iterable

import pytest

slow = pytest.mark.slow
exhaustive = pytest.mark.exhaustive


def mostly_slow(values: Iterable[object], *, every: int, ids: Iterable[str] | None = None, rare: int = 1) -> list:
    """Values to parametrize a test by, of which one in so many is left to the fast tests.

    Args:
        values: All of them; each suite has its share, and no value is in two.
        every: The last of so many stays fast.
        ids: Their names, where they are no strings.
        rare: Of the others, the first of so many is slow; the rest are for `make test-exhaustive`.
    """
    values = list(values)
    names = [str(value) for value in values] if ids is None else list(ids)
    return [
        pytest.param(value, id=name, marks=mark_of(number, every=every, rare=rare))
        for number, (value, name) in enumerate(zip(values, names, strict=True))
    ]


def mark_of(number: int, *, every: int, rare: int) -> tuple:
    """The mark of one of many: one in `every` has none, and of the others one in `rare` is slow."""
    if number % every == every - 1:
        return ()
    return (slow if number % rare == 0 else exhaustive,)
