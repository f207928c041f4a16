"""Detail: how much a page shows of what is long, so that no page is heavy however large a study is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

MOST_BYTES = 150_000
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Detail:
    """How long is too long.

    Args:
        numbers: Of all curves of one figure.
        cells: Modules side by side in one strip; more are merged.
        rows: Of a table behind a click, and layers in a drawing.
    """

    numbers: int
    cells: int
    rows: int


FULL = Detail(9000, 240, 1000)
_COARSER = (Detail(4000, 96, 80), Detail(1800, 48, 24), Detail(700, 24, 10))


def fit(make: Callable[[Detail], tuple[_Made, str]]) -> tuple[_Made, str]:
    """The most detailed page that is light, or the coarsest.

    Args:
        make: What is shown in a detail, and the page of it.
    """
    made = make(FULL)
    for detail in _COARSER:
        if len(made[1].encode("utf-8", errors="replace")) <= MOST_BYTES:
            break
        made = make(detail)
    return made
