"""What a run's page says below its curves: layers against the format's limits, epochs, events."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from floatline.formats import Format
from floatline.report.chart import marks_of
from floatline.report.document.detail import FULL
from floatline.report.document.document import Block, Drawing, Part, Table, Tone, Words
from floatline.report.document.format_scale import TOP, FormatScale
from floatline.report.run.facts import LayerFacts, RunFacts
from floatline.report.run.texts import UNKNOWN, headroom_of, show_number, show_scale, tone_of, trouble_of
from floatline.report.validation.drawings import frame

_ROW, _STRIP = 46, 16
_LONGEST = 24  # characters of a name that leave room for the words at the end of the line, on a phone too


def layers_svg(layers: Sequence[LayerFacts], fmt: Format, *, summary: str) -> str:
    """Each layer's norm, scaled as the backward pass held it, between the format's floor and its ceiling.

    Args:
        layers: From the first row to the last.
        fmt: The format.
        summary: The same in words.
    """
    scale = FormatScale([exponent for exponent, _ in marks_of(fmt)])
    body = scale.head()
    for number, layer in enumerate(layers):
        y = TOP + _ROW * number
        body += _labels(layer, y + 14)
        body += scale.zones(y + 20, _STRIP)
        for x in map(scale.at, scale.limits):
            body.append(f'<line class="mark" x1="{x:.2f}%" x2="{x:.2f}%" y1="{y + 20}" y2="{y + 20 + _STRIP}"/>')
        body += _track(layer, y + 20 + _STRIP / 2, scale.at)
    return frame(body, height=TOP + _ROW * len(layers), summary=summary)


def _labels(layer: LayerFacts, y: float) -> list[str]:
    name = layer.name if len(layer.name) <= _LONGEST else f"…{layer.name[1 - _LONGEST :]}"
    # Few words: on a phone they must not meet the name.
    bad = f"{layer.num_nonfinite:,}× inf/NaN" if layer.num_nonfinite else ""
    near = "unknown" if (layer.headroom or 0.0) < 0 else headroom_of(layer)
    words = f"{near.removesuffix(' doublings')}, {bad}" if bad and layer.highest is not None else bad or near
    full = ", ".join(filter(None, (headroom_of(layer), trouble_of(layer))))
    return [
        f'<text x="0" y="{y}">{html.escape(name)}<title>{html.escape(layer.name)}</title></text>',
        f'<text class="word {tone_of(layer)}" x="100%" y="{y}" text-anchor="end">{html.escape(words)}'
        f"<title>{html.escape(full)}</title></text>",
    ]


def _track(layer: LayerFacts, y: float, at: Callable[[float], float]) -> list[str]:
    """A line from the lowest norm to the highest, and a dot at the newest."""
    body: list[str] = []
    tone = tone_of(layer)
    if layer.lowest and layer.highest:
        low, high = at(math.log2(layer.lowest)), at(math.log2(layer.highest))
        body.append(f'<line class="bar {tone}" x1="{low:.2f}%" x2="{max(high, low + 0.3):.2f}%" y1="{y}" y2="{y}"/>')
    if layer.newest and math.isfinite(layer.newest):
        body.append(f'<circle class="dot {tone}" cx="{at(math.log2(layer.newest)):.2f}%" cy="{y}" r="5"/>')
    return body


_MOST_DRAWN, _MOST_EVENTS, _MOST_EPOCHS = 16, 100, 60


def details_of(run: RunFacts, *, most: int = FULL.rows) -> list[Part]:
    """The parts, in the order in which a reader asks.

    Args:
        run: What is shown.
        most: Layers at most, epochs, and events.
    """
    parts = [_layers(run, most)]
    if len(run.epochs) > 1:
        parts.append(Part("Epochs", (_epochs(run, min(most, _MOST_EPOCHS)),)))
    if run.events:
        parts.append(Part("Events", (_events(run, min(most, _MOST_EVENTS)),)))
    return parts


def _layers(run: RunFacts, most: int) -> Part:
    if not run.layers:
        how = "Norms by layer were not recorded: Guard(..., record_layers_every=50) does."
        return Part("Headroom by layer", (Words(how, "missing"),))
    rows = tuple(
        (
            layer.name,
            show_number(layer.norm),
            show_number(layer.highest),
            headroom_of(layer) if run.format is not None else UNKNOWN,
            trouble_of(layer) or "0",
        )
        for layer in run.layers[:most]
    )
    head = ("layer", "newest norm", "highest × scale", "headroom", "inf/NaN")
    tones: tuple[Tone, ...] = tuple(tone_of(layer) for layer in run.layers[:most])
    many = len(run.layers) > 4 and run.format is not None
    num = len(run.layers)
    caption = f"All {num:,} layers" if len(rows) == num else f"The {len(rows):,} of {num:,} layers nearest to a limit"
    table = Table(caption, head, rows, named=(0,), numeric=(1, 2), tones=tones, folded=many, cards=True)
    if run.format is None:
        why = "The ledger names no plan, so the format is not known: these are the norms alone."
        return Part("Gradient norms by layer", (Words(why, "missing"), table))
    # A layer that never had a finite norm has nothing to draw: the table says so.
    finite = [layer for layer in run.layers if layer.highest is not None]
    shown = finite[: min(most, _MOST_DRAWN)]
    if not shown:
        return Part(
            "Headroom by layer", (Words("No layer has had a finite norm.", "flag"), replace(table, folded=False))
        )
    words = "; ".join(f"{layer.name} {headroom_of(layer)} {trouble_of(layer)}".strip() for layer in shown)
    legend = (
        f"Gradient norm × loss scale against {run.format.name}: the line is where it has been, the dot is the newest. "
        "No element is larger than the norm, so the largest can double at least so often; where the norm is above the "
        "format's max, that says nothing. Activations are not in a ledger."
    )
    rest, lost = len(finite) - len(shown), len(run.layers) - len(finite)
    blocks: list[Block] = [Drawing(layers_svg(shown, run.format, summary=words), words), Words(legend, "note")]
    if rest:
        blocks.append(Words(f"{rest:,} more are further from a limit.", "note"))
    if lost:
        blocks.append(Words(f"{lost:,} more had no finite norm other than 0, or none at all.", "flag"))
    return Part("Headroom by layer", (*blocks, table))


def _epochs(run: RunFacts, most: int) -> Table:
    newest = list(run.epochs.items())[-most:]
    rows = tuple(
        (
            f"{number:,}",
            show_number(account.mean_loss),
            f"{account.applied:,} of {account.attempted:,}",
            ", ".join(f"{count:,} {reason}" for reason, count in account.skipped.items() if count) or "0",
            show_scale(account.scale),
            f"{account.num_scale_reductions:,}",
        )
        for number, account in newest
    )
    head = ("epoch", "mean loss", "applied", "skipped", "scale", "reductions")
    caption = "A row for each epoch"
    if len(newest) < len(run.epochs):
        caption = f"The last {len(newest):,} of {len(run.epochs):,} epochs"
    return Table(caption, head, rows, numeric=(0, 1, 2, 4, 5), folded=len(rows) > 12, cards=True)


def _events(run: RunFacts, most: int) -> Table:
    newest = run.events[-most:]
    rows = tuple(
        (
            f"{event.attempt:,}",
            event.event,
            event.message,
            ", ".join(f"{name} {show_number(value)}" for name, value in event.values.items()),
        )
        for event in reversed(newest)
    )
    caption = "The newest first"
    if len(newest) < run.num_events:
        caption += f": {len(newest):,} of {run.num_events:,}"
    return Table(caption, ("after step", "event", "what", "numbers"), rows, named=(1,), numeric=(0,), cards=True)
