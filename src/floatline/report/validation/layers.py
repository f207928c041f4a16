"""The modules of one recorded step: headroom in the format, and agreement of the gradients with FP32's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from floatline.report.document.detail import FULL, Detail
from floatline.report.document.document import Block, Drawing, Part, Table, Tone, Words
from floatline.report.validation.drawings import strips_svg
from floatline.report.validation.texts import UNKNOWN, show_share

if TYPE_CHECKING:
    from floatline.validation.result import LayerNumbers

_MOST_OPEN = 10
_Cell = tuple[int | None, str]
_TONES: tuple[Tone, ...] = ("good", "warn", "bad")
# What the colours of the strips mean. They are to guide the eye: no verdict depends on them.
_HEADROOM = (2.0, 0.0)
_COSINE = (0.99, 0.9)
_LOST = (0.01, 0.1)
_LEGEND = (
    "Green, amber, red: headroom from 2 bits, from 0, below 0 (overflow); cosine from 0.99, from 0.9, below; "
    "lost gradients up to 1 %, up to 10 %, above. They guide the eye, and no verdict depends on them."
)


def layer_part(layers: Sequence[LayerNumbers], *, detail: Detail = FULL, brief: bool = False) -> Part:
    """A heat strip and a table: the modules worth a look, and behind a click all of them.

    Args:
        layers: In order of execution.
        detail: How many of them are shown one by one.
        brief: Only those worth a look: report.json has all of them.
    """
    heading = "Layer by layer, against FP32"
    if not layers:
        return Part(heading, (Words("No step was recorded layer by layer.", "missing"),))
    strips: list[tuple[str, str, Callable[[LayerNumbers], int | None], Callable[[LayerNumbers], str]]] = [
        ("headroom", "headroom", _headroom_level, _headroom),
        ("gradient agreement (cosine)", "cosine", _cosine_level, _cosine),
        ("gradients lost to zero", "lost", _lost_level, lambda layer: show_share(layer.lost)),
    ]
    # A column is read as a whole: where it is one module, the first strip names it.
    is_merged = len(layers) > detail.cells
    rows = [
        (
            name,
            [
                (level(layer), f"{_name(layer)}: " * (is_merged or not number) + f"{short} {show(layer)}")
                for layer in layers
            ],
        )
        for number, (name, short, level, show) in enumerate(strips)
    ]
    summary = f"{len(layers)} modules in order of execution. {'; '.join(_counts(name, cells) for name, cells in rows)}."
    drawn = strips_svg([(name, _merge(cells, detail.cells)) for name, cells in rows], summary=summary)
    blocks: list[Block] = [Words(summary)] if brief else [Drawing(drawn, summary), Words(_LEGEND, "note")]
    worst = sorted(sorted(layers, key=_badness)[:_MOST_OPEN], key=_least_headroom)
    if len(layers) > _MOST_OPEN:
        caption = f"The {_MOST_OPEN} modules most worth a look, the least headroom first"
        blocks.append(_table(caption, worst, folded=False))
        fits = len(layers) <= detail.rows and not brief
        whole = _table(f"All {len(layers)} modules, in order of execution", layers, folded=True)
        blocks.append(whole if fits else Words("All of them are in report.json.", "note"))
    else:
        blocks.append(_table("The modules, in order of execution", layers, folded=False))
    return Part(heading, tuple(blocks))


def _table(caption: str, layers: Sequence[LayerNumbers], *, folded: bool) -> Table:
    return Table(
        caption,
        ("module", "headroom", "cosine", "norm ratio", "lost to zero"),
        tuple(
            (
                _name(layer),
                _headroom(layer),
                _cosine(layer),
                UNKNOWN if layer.norm_ratio is None else f"{layer.norm_ratio:.4g}",
                show_share(layer.lost),
            )
            for layer in layers
        ),
        named=(0,),
        numeric=(1, 2, 3, 4),
        tones=tuple(_TONES[_level(layer)] for layer in layers),
        folded=folded,
    )


def _merge(cells: list[_Cell], most: int) -> list[_Cell]:
    """At most so many: the worst of each run of neighbours stands for it."""
    wide = -(-len(cells) // most)
    runs = [cells[start : start + wide] for start in range(0, len(cells), wide)]
    return [max(run, key=lambda cell: -1 if cell[0] is None else cell[0]) for run in runs]


def _counts(name: str, cells: list[_Cell]) -> str:
    levels = [level for level, _ in cells]
    return f"{name}: {levels.count(0)} green, {levels.count(1)} amber, {levels.count(2)} red"


def _name(layer: LayerNumbers) -> str:
    return layer.module or "(outside of modules)"


def _headroom(layer: LayerNumbers) -> str:
    if layer.headroom is None:
        return UNKNOWN
    if not math.isfinite(layer.headroom):
        return "overflows"
    return f"{layer.headroom:.1f} bits" if layer.headroom >= 0 else f"{layer.headroom:.1f} bits, overflows"


def _cosine(layer: LayerNumbers) -> str:
    return UNKNOWN if layer.cosine is None else f"{layer.cosine:.5f}"


def _headroom_level(layer: LayerNumbers) -> int | None:
    return None if layer.headroom is None else sum(layer.headroom < bound for bound in _HEADROOM)


def _cosine_level(layer: LayerNumbers) -> int | None:
    if layer.cosine is None:
        return None
    return sum(not layer.cosine >= bound for bound in _COSINE)  # NaN agrees with nothing


def _lost_level(layer: LayerNumbers) -> int:
    return sum(layer.lost > bound for bound in _LOST)


def _level(layer: LayerNumbers) -> int:
    return max(_headroom_level(layer) or 0, _cosine_level(layer) or 0, _lost_level(layer))


def _badness(layer: LayerNumbers) -> tuple[int, float, float]:
    """Red before amber before green, then the lowest agreement, then the least headroom."""
    cosine = 1.0 if layer.cosine is None else layer.cosine if layer.cosine == layer.cosine else -1.0
    return -_level(layer), cosine, _least_headroom(layer)


def _least_headroom(layer: LayerNumbers) -> float:
    return math.inf if layer.headroom is None else layer.headroom
