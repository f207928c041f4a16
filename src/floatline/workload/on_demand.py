"""OnDemand: a sequence whose entries are made when they are asked for, such as batches of files that fill no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class OnDemand(Sequence[T]):
    """Entries of a function; nothing is kept, so that the same number must give the same entry each time.

    Args:
        make: Gives the entry of a number.
        numbers: Which ones there are, or how many from 0 on.
    """

    def __init__(self, make: Callable[[int], T], numbers: range | int) -> None:
        self._make = make
        self._numbers = range(numbers) if isinstance(numbers, int) else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> OnDemand[T]: ...

    def __getitem__(self, index: int | slice) -> T | OnDemand[T]:
        if isinstance(index, slice):
            return OnDemand(self._make, self._numbers[index])
        return self._make(self._numbers[index])
