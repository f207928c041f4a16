"""Whether a run would fit a narrower format, for people: what would not, the worst first. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from floatline.base.texts import percent, printable

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.diagnosis.headroom.would_fit import FitRow, FormatFit

_MOST_ROWS = 12


def print_fit(fits: Sequence[FormatFit], console: Console) -> None:
    """Print what would not fit, format by format."""
    for fit in fits:
        _print_one(fit, console)


def as_json(target: str, fits: Sequence[FormatFit]) -> dict[str, Any]:
    """One object for all formats."""
    return {"target": target, "formats": [fit.as_json() for fit in fits]}


def _print_one(fit: FormatFit, console: Console) -> None:
    scale = "each tensor with a scale of its own" if fit.scale is None else f"loss scale {fit.scale:g}"
    steps = f"{len(fit.steps)} step{'s' if len(fit.steps) != 1 else ''}"
    least = min((row.headroom for row in fit.rows), default=math.inf)
    if not fit.unfit:
        words = f"  everything fits, {_bits(least)} of headroom at least ({steps}, {scale})"
        console.print(Text.assemble((fit.format, "bold green"), words), soft_wrap=True)
        return
    places = "1 place" if len(fit.unfit) == 1 else f"{len(fit.unfit)} places"
    count = f"  {places} would not fit ({steps}, {scale})"
    console.print(Text.assemble((fit.format, "bold red"), count), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (("headroom", "right"), ("lost", "right"), ("largest", "right")):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    for name in ("what", "module", "where"):
        table.add_column(name, overflow="fold")
    for row in fit.unfit[:_MOST_ROWS]:
        lost = percent(row.lost) if row.lost else ""
        what = {"weight": "weight", "refused": row.op}.get(row.kind, f"{row.kind} of {row.op}")
        largest = "" if math.isnan(row.largest) else f"{row.largest:.3g}"
        table.add_row(_bits(row.headroom), lost, largest, _clean(what), _clean(row.module or "-"), _place(row))
    console.print(table)
    if len(fit.unfit) > _MOST_ROWS:
        console.print(Text(f"and {len(fit.unfit) - _MOST_ROWS} more", "dim"))


def _bits(bits: float) -> str:
    if math.isinf(bits):
        return "any" if bits > 0 else "raises"
    return f"{bits:+.1f} bits"


def _place(row: FitRow) -> str:
    return _clean(f"{Path(row.file).name}:{row.line}" if row.file else row.op)


def _clean(words: str) -> str:
    return printable(words).replace("[", "\\[")
