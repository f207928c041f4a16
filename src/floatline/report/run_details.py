"""What a run's page says below its curves: layers against the format's limits, epochs, events."""

from __future__ import annotations

from floatline.report.document import Block, Drawing, Part, Table, Tone, Words
from floatline.report.run_drawings import layers_svg
from floatline.report.run_facts import RunFacts
from floatline.report.run_texts import UNKNOWN, headroom_of, show_number, show_scale, tone_of, trouble_of

_MOST_DRAWN, _MOST_EVENTS, _MOST_EPOCHS = 16, 100, 60


def details_of(run: RunFacts) -> list[Part]:
    """The parts, in the order in which a reader asks."""
    parts = [_layers(run)]
    if len(run.epochs) > 1:
        parts.append(Part("Epochs", (_epochs(run),)))
    if run.events:
        parts.append(Part("Events", (_events(run),)))
    return parts


def _layers(run: RunFacts) -> Part:
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
        for layer in run.layers
    )
    head = ("layer", "newest norm", "highest × scale", "headroom", "inf/NaN")
    tones: tuple[Tone, ...] = tuple(tone_of(layer) for layer in run.layers)
    many = len(run.layers) > 4 and run.format is not None
    table = Table(
        f"All {len(rows):,} layers", head, rows, named=(0,), numeric=(1, 2), tones=tones, folded=many, cards=True
    )
    if run.format is None:
        why = "The ledger names no plan, so the format is not known: these are the norms alone."
        return Part("Gradient norms by layer", (Words(why, "missing"), table))
    shown = run.layers[:_MOST_DRAWN]
    words = "; ".join(f"{layer.name} {headroom_of(layer)} {trouble_of(layer)}".strip() for layer in shown)
    legend = (
        f"Gradient norm × loss scale against {run.format.name}: the line is where it has been, the dot is the newest. "
        "No element is larger than the norm, so the largest can double at least so often; where the norm is above the "
        "format's max, that says nothing. Activations are not in a ledger."
    )
    rest = len(run.layers) - len(shown)
    blocks: list[Block] = [Drawing(layers_svg(shown, run.format, summary=words), words), Words(legend, "note")]
    if rest:
        blocks.append(Words(f"{rest:,} more are further from a limit.", "note"))
    return Part("Headroom by layer", (*blocks, table))


def _epochs(run: RunFacts) -> Table:
    newest = list(run.epochs.items())[-_MOST_EPOCHS:]
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
    caption = "Epochs" if len(newest) == len(run.epochs) else f"The last {len(newest):,} of {len(run.epochs):,} epochs"
    return Table(caption, head, rows, numeric=(0, 1, 2, 4, 5), folded=len(rows) > 12, cards=True)


def _events(run: RunFacts) -> Table:
    newest = run.events[-_MOST_EVENTS:]
    rows = tuple(
        (
            f"{event.attempt:,}",
            event.event,
            event.message,
            ", ".join(f"{name} {value:g}" for name, value in event.values.items()),
        )
        for event in reversed(newest)
    )
    caption = "Events, the newest first"
    if len(newest) < run.num_events:
        caption += f": {len(newest):,} of {run.num_events:,}"
    return Table(caption, ("after step", "event", "what", "numbers"), rows, named=(1,), numeric=(0,), cards=True)
