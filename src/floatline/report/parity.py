"""A parity for people: the verdict on the terminal, and a page with the curve over the layers. Computes nothing."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from floatline import __version__
from floatline.agreement.compiled.arms import CompiledParity
from floatline.agreement.logprobs.comparing import LogprobParity
from floatline.agreement.reading import Reading
from floatline.agreement.result import LayerReading, Parity
from floatline.base.json_values import plain_json
from floatline.report.document.document import Block, Document, Drawing, Part, Table, Tile, Tone, Words
from floatline.report.document.html import page_of, put_in_place
from floatline.report.document.markdown import markdown_of
from floatline.report.validation.drawings import frame
from floatline.report.validation.texts import sentence

AnyParity = Parity | CompiledParity | LogprobParity

_MARKS = {"agree": "AGREE", "farther": "FARTHER", "other-function": "OTHER FUNCTION", "wrong": "WRONG"}
TONES: dict[str, Tone] = {"AGREE": "good", "FARTHER": "warn", "OTHER FUNCTION": "bad", "WRONG": "bad"}
_STYLES = {"agree": "bold green", "farther": "bold yellow", "other-function": "bold red", "wrong": "bold red"}
_HEIGHT, _TOP, _LEFT = 200, 12, 12
_MOST_ROWS = 12


def print_parity(found: AnyParity, files: dict[str, str], console: Console) -> None:
    """Print the verdict, what decided it, where it enters, and where the files are."""
    lines = str(found).splitlines()
    console.print(Text(_MARKS[found.verdict], style=_STYLES[found.verdict]) + Text(f"  {lines[0]}"), soft_wrap=True)
    for line in lines[1:]:
        console.print(Text(line), soft_wrap=True)
    if isinstance(found, LogprobParity):
        for tried in found.remedies:
            said = f"not tried: {tried.problem}"
            if tried.ratios is not None:
                said = f"{100 * tried.ratios.outside:.3g} % outside, KL {tried.ratios.kl:.2g}, "
                said += f"{tried.gap_to_fp32:.2g} from FP32"
            console.print(Text(f"  {tried.name}: {said}"), soft_wrap=True)
    else:
        parity = found.parity if isinstance(found, CompiledParity) else found
        for note in parity.notes:
            console.print(Text(f"  note: {note}", style="dim"), soft_wrap=True)
    for name, path in files.items():
        console.print(Text(f"  {name}: {path}"), soft_wrap=True)


def write_parity(found: AnyParity, folder: Path) -> dict[str, str]:
    """Write report.html, report.md and parity.json, each in one step; gives their paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    document = document_of_parity(found)
    files = {name: folder / name for name in ("report.html", "report.md", "parity.json")}
    put_in_place(files["report.html"], page_of(document, tones=TONES))
    put_in_place(files["report.md"], markdown_of(document))
    data = json.dumps(plain_json(found.as_json()), indent=1, ensure_ascii=False, allow_nan=False)
    put_in_place(files["parity.json"], data + "\n")
    return {name: str(path) for name, path in files.items()}


def document_of_parity(found: AnyParity) -> Document:
    """The report."""
    if isinstance(found, LogprobParity):
        return _document_of_logprobs(found)
    parity = found.parity if isinstance(found, CompiledParity) else found
    worst = parity.worst
    parts = [
        _where(parity),
        *_curves(parity.layers, parity.a, parity.b),
        _readings(parity.readings, "Outputs and gradients"),
    ]
    if isinstance(found, CompiledParity) and found.emulated:
        parts.append(_readings(found.emulated, "Compiled with emulate_precision_casts"))
    return Document(
        title=f"{parity.a} and {parity.b}",
        subtitle=f"By {worst.name}{'' if worst.phase == 'forward' else ', its gradient'}",
        verdict=_MARKS[parity.verdict],
        meaning="Distances are norms of differences over the norm of FP32's.",
        reason=sentence(parity.summary),
        tiles=(
            Tile("A to B", _show(worst.apart), ""),
            Tile(f"A to {worst.exact}", _show(worst.a), _explained(worst.excess_a)),
            Tile(f"B to {worst.exact}", _show(worst.b), _explained(worst.excess_b)),
            Tile("FP32's own", _show(worst.floor), "its roundings moved by a unit"),
        ),
        flags=parity.notes,
        todo=_todo(parity),
        before=tuple(parts),
        chapters=(),
        after=(),
        footer=f"Made by floatline {__version__} in {parity.seconds:.0f} s.",
    )


def _explained(excess: float) -> str:
    """A distance against what the rounding of its formats explains."""
    shown = f"{excess:.2g}"
    return "no more than rounding explains" if float(shown) <= 1 else f"{shown} times what rounding explains"


def _todo(parity: Parity) -> tuple[str, ...]:
    """What to look at; where both are within rounding, nothing."""
    if parity.verdict == "agree":
        return ("Nothing is to be done: either may stand for the other.",)
    if parity.entry is None:
        return ("The tables below have what differs most.",)
    return (sentence(f"look at {parity.entry}"),)


def _where(parity: Parity) -> Part:
    if parity.entry is None:
        return Part("Where they part", (Words("Nowhere: both are within rounding."),))
    entry = parity.entry
    blocks: list[Block] = [Words(sentence(f"it enters at {entry}"))]
    if entry.op is not None and entry.op.also:
        blocks.append(Words(f"What it reads was made at {', '.join(entry.op.also)}.", "note"))
    if entry.others:
        blocks.append(Words(f"Also in {', '.join(entry.others)}.", "note"))
    return Part("Where they part", tuple(blocks))


def _readings(readings: Sequence[Reading], heading: str) -> Part:
    rows = sorted(readings, key=lambda reading: reading.weight, reverse=True)
    tones: tuple[Tone, ...] = tuple(TONES[_MARKS[row.verdict]] for row in rows)
    cells = tuple(
        (
            row.name,
            "output" if row.phase == "forward" else "gradient",
            _show(row.apart),
            _show(row.a),
            _show(row.b),
            _show(row.floor),
            f"{row.verdict}{f' ({row.side})' if row.side else ''}",
        )
        for row in rows
    )
    head = ("name", "", "A to B", "A to FP32", "B to FP32", "FP32's own", "verdict")
    table = Table(
        "The worst first",
        head,
        cells,
        named=(0,),
        numeric=(2, 3, 4, 5),
        tones=tones,
        folded=len(rows) > _MOST_ROWS,
        cards=True,
    )
    return Part(heading, (table,))


def _curves(layers: Sequence[LayerReading], a: str, b: str) -> list[Part]:
    parts: list[Part] = []
    for phase, heading in (("forward", "Over the layers, forward"), ("backward", "Over the layers, backward")):
        rows = [layer for layer in layers if layer.phase == phase]
        if not rows:
            continue
        drawn = draw_layers(rows, a, b)
        cells = tuple((row.name, _show(row.apart), _show(row.a), _show(row.b), _show(row.noise_b)) for row in rows)
        head = ("layer", "A to B", "A to FP32", "B to FP32", "B's rounding")
        table = Table(f"All {len(rows)} layers", head, cells, named=(0,), numeric=(1, 2, 3, 4), folded=True)
        parts.append(Part(heading, (*([drawn] if drawn is not None else []), table)))
    return parts


def draw_layers(rows: Sequence[LayerReading], a: str, b: str) -> Drawing | None:
    """Distances to FP32 over the layers, on a logarithmic scale; None where all are 0.

    Args:
        rows: In the order of the run.
        a: Name of A.
        b: Name of B.
    """
    curves = {
        f"{a} to FP32": [row.a for row in rows],
        f"{b} to FP32": [row.b for row in rows],
        f"{b}'s rounding": [row.noise_b for row in rows],
    }
    known = [value for values in curves.values() for value in values if 0 < value < math.inf]
    if not known:
        return None
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    high = max(high, low + 1)

    def x(place: int) -> float:
        return _LEFT + (100 - _LEFT) * place / max(1, len(rows) - 1)

    def y(value: float) -> float:
        power = high if value == math.inf else low if value <= 0 else math.log10(value)
        return _TOP + _HEIGHT * (1 - (power - low) / (high - low))

    body: list[str] = []
    for power in range(low, high + 1):
        height = y(10.0**power)
        body.append(f'<line class="mark" x1="{_LEFT}%" x2="100%" y1="{height:.1f}" y2="{height:.1f}"/>')
        body.append(f'<text class="muted" x="0" y="{height + 4:.1f}">1e{power}</text>')
    for number, values in enumerate(curves.values()):
        points = [(x(place), y(value)) for place, value in enumerate(values)]
        for (x1, y1), (x2, y2) in itertools.pairwise(points):
            body.append(f'<line class="run p{number}" x1="{x1:.2f}%" y1="{y1:.1f}" x2="{x2:.2f}%" y2="{y2:.1f}"/>')
    for place, row in enumerate(rows):
        title = html.escape(f"{row.name}: {a} {_show(row.a)}, {b} {_show(row.b)}")
        body.append(
            f'<circle cx="{x(place):.2f}%" cy="{y(row.b):.1f}" r="3" class="p1"><title>{title}</title></circle>'
        )
    first, last = rows[0], rows[-1]
    summary = (
        f"From {first.name} ({a} {_show(first.a)}, {b} {_show(first.b)}) to {last.name} ({a} {_show(last.a)}, "
        f"{b} {_show(last.b)})"
    )
    return Drawing(frame(body, height=_HEIGHT + 2 * _TOP, summary=summary), f"{summary}.", legend=tuple(curves))


def _document_of_logprobs(found: LogprobParity) -> Document:
    ratios, low, high = found.ratios, *found.band
    carriers = tuple(
        (str(c.sequence), str(c.position), str(c.token), f"{c.ratio:.3g}", f"{100 * c.share:.3g} %")
        for c in ratios.carriers
    )
    remedies = tuple(
        (t.name, f"{100 * t.ratios.outside:.3g} %", f"{t.ratios.kl:.2g}", f"{t.gap_to_fp32:.2g}", "")
        if t.ratios is not None
        else (t.name, "", "", "", t.problem)
        for t in found.remedies
    )
    parts = [
        Part(
            "Tokens that carry it",
            (
                Table(
                    "The most first",
                    ("sequence", "position", "token", "ratio", "of the KL"),
                    carriers,
                    numeric=(0, 1, 2, 3, 4),
                ),
            ),
        )
    ]
    if remedies:
        head = ("done to the model", "outside", "KL", "from FP32", "not done because")
        parts.append(Part("What helps", (Table("Each measured against the file", head, remedies, numeric=(1, 2, 3)),)))
    return Document(
        title=f"the model and {Path(found.file).name}",
        subtitle=f"{ratios.num_tokens:,} tokens",
        verdict=_MARKS[found.verdict],
        meaning="Ratios are exp(model - file) of the log-probs of a token.",
        reason=sentence(found.summary),
        tiles=(
            Tile("Outside", f"{100 * ratios.outside:.3g} %", f"of ratios, of [{low:g}, {high:g}]"),
            Tile("KL", f"{ratios.kl:.2g}", "a sequence"),
            Tile("Largest ratio", f"{ratios.largest:.3g}", ""),
            Tile("Nearest", "none" if found.best is None else found.best.name, "of what was tried"),
        ),
        flags=found.notes,
        before=tuple(parts),
        chapters=(),
        after=(),
        footer=f"Made by floatline {__version__} in {found.seconds:.0f} s.",
    )


def _show(value: float) -> str:
    return f"{value:.2g}"
