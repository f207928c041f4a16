"""Runs for the terminal: how they stand, their curves as sparklines, and their layers against the format's limits."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Literal

from rich.text import Text

from floatline.base.texts import printable
from floatline.formats import Format
from floatline.ledger.progress import Spread
from floatline.report.chart import draw_axis, draw_labels, marks_of
from floatline.report.run.facts import LayerFacts, RunFacts
from floatline.report.run.texts import (
    TONES,
    UNKNOWN,
    headroom_of,
    loss_of,
    norm_of,
    place_of,
    scale_of,
    show_number,
    show_pace,
    show_percent,
    show_scale,
    skips_of,
    spark,
    time_of,
    tone_of,
    trouble_of,
)

_BLOCKS = "▁▂▃▄▅▆▇█"
# For terminals without Unicode; each sign is as wide as what it stands for.
_PLAIN_SIGNS = str.maketrans(
    {**dict(zip(_BLOCKS, "_.,-=+*#", strict=True)), "●": "o", "─": "-", "│": "|", "┴": "+", "·": "-", "≥": ">"}
    | {"—": "-", "…": "~", "×": "x"}
)
_COLOURS = {"good": "green", "warn": "yellow", "bad": "red", "unsure": "magenta", "plain": ""}
_LABEL, _VALUE = 9, 11
_MOST_LAYERS, _LAYER_LINES = 8, 5  # layers shown, and the lines above and below them
_NARROW = 72
_ROOM = 0.075  # beyond the format's limits, as a share of what is between them


def draw_runs(runs: Sequence[RunFacts], *, width: int = 80, height: int | None = None, plain: bool = False) -> Text:
    """One run in full, or several in a few lines each.

    Args:
        runs: What is shown.
        width: Columns of the terminal.
        height: Its rows; None: as many as it takes.
        plain: Only signs that every terminal has.
    """
    if len(runs) == 1:
        lines = _one(runs[0], width, height)
    else:
        lines = [line for run in runs for line in (*_brief(run, width), Text())][:-1]
    for line in lines:
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
    text = Text("\n", no_wrap=True).join(lines)
    if plain:
        text.plain = text.plain.translate(_PLAIN_SIGNS).encode("ascii", "replace").decode()
    return text


def _one(run: RunFacts, width: int, height: int | None) -> list[Text]:
    lines = [*_head(run, width), Text(f"{'':{_LABEL}}{_pace(run)}", style="dim")]
    found = [event for event in run.events if event.event == "diagnosis"]
    if found:  # what is known about the cause comes first
        lines += _labelled("cause", f"{found[-1].message} (step {found[-1].attempt:,})", width, "bold red")
    lines += _row("loss", show_number(run.account.last_loss), _values(run, "loss"), loss_of(run), width)
    lines += _row("norm", show_number(run.grad_norm), _values(run, "norm"), norm_of(run), width)
    lines += _row("scale", show_scale(run.account.scale), _powers(_values(run, "scale")), scale_of(run), width)
    lines += _labelled("skipped", skips_of(run), width, "yellow" if run.account.num_skipped else "")
    if run.lost_share is not None:
        lines += _labelled("lost", f"{show_percent(run.lost_share)} of gradient elements rounded to zero", width)
    if run.events:
        more = f" (and {run.num_events - 1:,} before)" if run.num_events > 1 else ""
        lines += _labelled("event", f"{run.events[-1]}{more}", width)
    room = _MOST_LAYERS if height is None else min(_MOST_LAYERS, height - len(lines) - _LAYER_LINES)
    if run.layers and room > 0:
        lines += [Text(), *_layers(run, width, room)]
    return lines


def _brief(run: RunFacts, width: int) -> list[Text]:
    lines = _head(run, width)
    lines += _row("loss", show_number(run.account.last_loss), _values(run, "loss"), loss_of(run), width)
    words = f"{skips_of(run)} · scale {show_scale(run.account.scale)} · norm {show_number(run.grad_norm)}"
    lines += _labelled("skipped", words, width, "yellow" if run.account.num_skipped else "")
    if run.layers:
        worst = run.layers[0]
        words = " · ".join(filter(None, (printable(worst.name), headroom_of(worst), trouble_of(worst))))
        lines += _labelled("nearest", words, width, _COLOURS[tone_of(worst)])
    return lines


def _head(run: RunFacts, width: int) -> list[Text]:
    name = Text.assemble((printable(run.name), "bold"), "  ", (run.state, f"bold {_COLOURS[TONES[run.state]]}"), "  ")
    words = f"{place_of(run)} · {time_of(run)}"
    if len(name) + len(words) <= width:
        return [name.append(words)]
    return [name, Text(f"{'':{_LABEL}}{words}")]


def _pace(run: RunFacts) -> str:
    words = [run.plan and f"plan {printable(run.plan)}", show_pace(run) if run.steps_per_second else ""]
    words.append(f"lr {run.lr:.3g}" if run.lr is not None else "")
    words.append(f"gone on with {run.num_resumes:,} times" if run.num_resumes else "")
    return " · ".join(filter(None, words)) or UNKNOWN


def _labelled(label: str, words: str, width: int, style: str = "") -> list[Text]:
    """Words behind their label, in as many lines as it takes."""
    pieces = textwrap.wrap(words, max(width - _LABEL, 20)) or [""]
    return [Text.assemble((f"{'' if i else label:{_LABEL}}", "dim"), (piece, style)) for i, piece in enumerate(pieces)]


def _row(label: str, value: str, values: list[float | None], note: str, width: int) -> list[Text]:
    """Newest value, sparkline and note; the note on its own line where the terminal is narrow."""
    narrow = width < _NARROW
    room = width - _LABEL - _VALUE - (0 if narrow else len(note) + 2)
    line = Text.assemble((f"{label:{_LABEL}}", "dim"), (f"{value:<{_VALUE}}", "bold"))
    line.append(spark(values, max(min(room, 60), 1), steps=_BLOCKS), style="cyan")
    if narrow:
        return [line, Text(f"{'':{_LABEL + _VALUE}}{note}", style="dim")]
    return [line.append(f"  {note}", style="dim")]


def _values(run: RunFacts, which: Literal["loss", "norm", "scale"]) -> list[float | None]:
    spreads: list[Spread] = [getattr(stretch, which) for stretch in run.stretches]
    return [spread.mean if spread.num else None for spread in spreads]


def _powers(values: list[float | None]) -> list[float | None]:
    """A scale moves by factors of two: its exponent is what is seen."""
    return [None if value is None or value <= 0 else math.log2(value) for value in values]


def _layers(run: RunFacts, width: int, most: int) -> list[Text]:
    """The layers nearest to a limit, each with where its norm has been."""
    shown = run.layers[:most]
    rest = len(run.layers) - len(shown)
    more = f", {rest:,} more further away" if rest else ""
    if run.format is None:
        title = f"gradient norms by layer, the largest first; the ledger names no format{more}"
        return [Text(title, style="bold"), *(Text(f"{_short(layer, 40)}  {headroom_of(layer)}") for layer in shown)]
    names = [_short(layer, max(width // 3, 10)) for layer in shown]
    notes = [" · ".join(filter(None, (headroom_of(layer), trouble_of(layer)))) for layer in shown]
    indent = max(map(len, names)) + 1
    columns = max(width - indent - 2 - max(map(len, notes)), 12)
    at = _columns(run.format, columns)
    places = [(at(exponent), exponent, name) for exponent, name in marks_of(run.format)]
    lines = [Text(f"headroom in {run.format.name}: gradient norm × loss scale, by layer{more}", style="bold")]
    for layer, name, note in zip(shown, names, notes, strict=True):
        line = Text(f"{name:{indent}}")
        _draw_track(line, layer, run.format, columns, {column for column, _, _ in places})
        lines.append(line.append(f"  {note}", style=_COLOURS[tone_of(layer)]))
    lines.append(Text(" " * indent + draw_axis(places, columns), style="dim"))
    labels = draw_labels(places, columns).splitlines()
    return [*lines, *(Text(f"{'':{indent}}{label}", style="dim") for label in labels)]


def _columns(fmt: Format, columns: int) -> Callable[[float], int]:
    exponents = [exponent for exponent, _ in marks_of(fmt)]
    room = _ROOM * (max(exponents) - min(exponents))
    first, last = min(exponents) - room, max(exponents) + room

    def at(exponent: float) -> int:
        return min(max(int((exponent - first) / (last - first) * columns), 0), columns - 1)

    return at


def _draw_track(line: Text, layer: LayerFacts, fmt: Format, columns: int, limits: set[int]) -> None:
    """A line from the lowest norm to the highest, and a dot at the newest; the limits stay visible."""
    at = _columns(fmt, columns)
    low, high, newest = (
        None if value is None or not value or not math.isfinite(value) else math.log2(value)
        for value in (layer.lowest, layer.highest, layer.newest)
    )
    for column in range(columns):
        covered = low is not None and high is not None and at(low) <= column <= at(high)
        if newest is not None and column == at(newest):
            line.append("●", style=_COLOURS[tone_of(layer)])
        elif column in limits:
            line.append("│", style="dim")
        else:
            line.append("─" if covered else " ", style="cyan")


def _short(layer: LayerFacts, longest: int) -> str:
    """The name, cut at the front where it is long: the ends tell names apart."""
    name = printable(layer.name)
    return name if len(name) <= longest else f"…{name[1 - longest :]}"
