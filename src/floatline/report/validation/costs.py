"""What a candidate saves: time of a step and peak memory, with intervals, parts and the reasons behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from floatline.base.texts import format_bytes
from floatline.report.document.document import Block, Drawing, Part, Table, Words
from floatline.report.validation.drawings import Piece, speed_svg, stacks_svg
from floatline.report.validation.texts import (
    UNKNOWN,
    memory_of,
    memory_texts,
    sentence,
    show_change,
    show_time,
    show_times,
    speed_of,
    speed_texts,
)

if TYPE_CHECKING:
    from floatline.validation.result import PeakMemory, Speed, Validation
    from floatline.validation.verdict.comparison import Comparison

_REST = "the rest"
_PROCESS = "process"


def cost_part(validation: Validation, comparison: Comparison) -> Part:
    """Speed and memory of one candidate against the reference."""
    speed = speed_of(validation, comparison.candidate)
    ours, theirs = (memory_of(validation, arm) for arm in (comparison.candidate, comparison.reference))
    blocks = _speed_blocks(speed, comparison) if speed else [Words("Speed was not measured.", "missing")]
    blocks += _memory_blocks(ours, theirs) if ours and theirs else [Words("Memory was not measured.", "missing")]
    blocks += [Words(sentence(reason)) for reason in validation.reasons.get(comparison.candidate, ())]
    return Part("Speed and memory", tuple(blocks))


def _speed_blocks(speed: Speed, comparison: Comparison) -> list[Block]:
    timing = speed.timing
    value, detail = speed_texts(speed)
    rows = [
        (comparison.reference, 1.0, show_time(speed.reference_seconds)),
        (comparison.candidate, timing.ratio, show_time(speed.candidate_seconds)),
    ]
    summary = (
        f"A step takes {rows[0][2]} in {comparison.reference} and {rows[1][2]} in {comparison.candidate}: "
        f"{value} as fast, {detail}."
    )
    table = Table(
        "Time of a step, from interleaved pairs; medians",
        ("arm", "step", "speed", "interval"),
        (
            (comparison.reference, rows[0][2], show_times(1.0), UNKNOWN),
            (comparison.candidate, rows[1][2], value, f"{show_times(1 / timing.high)} to {show_times(1 / timing.low)}"),
        ),
        named=(0,),
        numeric=(1, 2, 3),
    )
    words = f"{sentence(timing.verdict)} From {timing.num_pairs:,} pairs of steps in random order, "
    words += f"{100 * timing.confidence:.3g} % confidence."
    if speed.first_seconds is not None:
        words += f" The first step took {show_time(speed.first_seconds)}, and is not among them."
    return [Drawing(speed_svg(rows, whisker=(timing.low, timing.high), summary=summary), summary), table, Words(words)]


def _memory_blocks(ours: PeakMemory, theirs: PeakMemory) -> list[Block]:
    change, detail = memory_texts(ours, theirs)
    stacks = [_pieces(memory) for memory in (theirs, ours)]
    names = list(dict.fromkeys(name for stack in stacks for name in stack))
    names.sort(key=_REST.__eq__)  # stable: what nothing explains goes last
    visible = [name for name in names if name != _PROCESS]
    sums = [sum(stack.get(name, 0) for name in visible) for stack in stacks]
    drawn = [
        (
            memory.arm,
            format_bytes(memory.peak - stack.get(_PROCESS, 0)),
            [Piece(name, stack.get(name, 0) / max(1, *sums), format_bytes(stack.get(name, 0))) for name in visible],
        )
        for memory, stack in zip((theirs, ours), stacks, strict=True)
    ]
    summary = f"Peak memory {change}: {detail}."
    rows = [("peak", theirs.peak, ours.peak)]
    rows += [(name, stacks[0].get(name), stacks[1].get(name)) for name in names if name != "peak"]
    table = Table(
        "Peak memory and its parts, each arm in a process of its own",
        ("part", theirs.arm, ours.arm, "change"),
        tuple(
            (name, _bytes(a), _bytes(b), show_change(b / a) if a and b is not None else UNKNOWN) for name, a, b in rows
        ),
        numeric=(1, 2, 3),
    )
    legend = tuple(visible) if len(visible) > 1 else ()
    blocks: list[Block] = [Drawing(stacks_svg(drawn, summary=summary), summary, legend=legend), table]
    if _PROCESS in names:
        blocks.insert(
            1, Words("The bars leave out the process itself: Python and torch, the same in both arms.", "note")
        )
    return blocks


def _bytes(count: int | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def _pieces(memory: PeakMemory) -> dict[str, int]:
    """The parts, and what of the peak none of them explains; the peak alone where no part was measured."""
    if not memory.parts:
        return {"peak": memory.peak}
    rest = memory.peak - sum(memory.parts.values())
    return {**memory.parts, **({_REST: rest} if rest > 0 else {})}
