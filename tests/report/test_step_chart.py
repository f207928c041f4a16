"""The chart of a step: what it draws is what the rows say, at any width and with any name."""

import io
import math
from itertools import pairwise

import pytest
from rich.console import Console

from floatline.causes import CAUSES
from floatline.diagnosis.headroom.step_rows import Row, Span
from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding
from floatline.formats import BF16, FP16
from floatline.report.chart import draw_step
from floatline.report.diagnosis import print_diagnosis

FITS = Span(0.01, 2.0, 2.0, 0.0, "fits")
OVERFLOW = Span(0.01, 3e4, 66000.0, 0.0, "overflows")
SUNK = Span(math.inf, 0.0, 1e-8, 0.987, "sinks")
BROKEN = Span(math.inf, 0.0, 0.0, 0.0, "nonfinite")


def row(module: str = "blocks.1.ff", forward: Span | None = FITS, backward: Span | None = None, **changes) -> Row:
    return Row(module, changes.pop("format", FP16), forward, backward, **changes)


def drawn(*rows: Row, width: int = 80) -> list[str]:
    return draw_step(rows, width=width).plain.splitlines()


def line_of(module: str, lines: list[str]) -> str:
    return next(line for line in lines if module in line)


def columns(line: str, axis: str) -> tuple[str, str, str, str]:
    """The four stretches of a row: below the floor, subnormal, normal, beyond the ceiling."""
    feet = [i for i, character in enumerate(axis) if character == "┴"]
    start = len(axis) - len(axis.lstrip())
    line = line.ljust(len(axis))[: len(axis)]
    cuts = [start, *feet, len(axis)]
    return tuple(line[a if a == start else a + 1 : b].strip() for a, b in pairwise(cuts))


def stretches(one: Row, width: int = 80) -> tuple[bool, ...]:
    lines = drawn(one, width=width)
    axis = next(line for line in lines if "┴" in line)
    return tuple(bool(part) for part in columns(lines[2], axis))


@pytest.mark.parametrize("width", [40, 64, 80, 120, 200])
@pytest.mark.parametrize(
    ("span", "zones"),
    [
        (FITS, (False, False, True, False)),
        (OVERFLOW, (False, False, True, True)),
        (SUNK, (True, False, False, False)),
        (BROKEN, (False, False, False, False)),
        (Span(1e-6, 1.0, 1.0, 0.0, "fits"), (False, True, True, False)),
    ],
    ids=["fits", "just beyond the ceiling", "sunk", "not a number", "subnormal"],
)
def test_bars_stand_in_the_zones_of_their_values(span, zones, width):
    assert stretches(row("m", span), width) == zones


@pytest.mark.parametrize("width", [40, 80, 120])
def test_there_is_room_beyond_the_limits_of_a_wide_format(width):
    over, sunk = Span(0.01, 1e38, 3.5e38, 0.0, "overflows"), Span(math.inf, 0.0, 1e-42, 1.0, "sinks")
    assert stretches(row("m", over, format=BF16), width) == (False, False, True, True)
    assert stretches(row("m", sunk, format=BF16), width)[0]


def test_forward_and_backward_share_a_row():
    lines = drawn(row("m.two", FITS, FITS), row("m.up", FITS), row("m.down", None, FITS))
    assert {c for c in line_of("m.two", lines) if c in "▀▄█"} == {"█"}
    assert {c for c in line_of("m.up", lines) if c in "▀▄█"} == {"▀"}
    assert {c for c in line_of("m.down", lines) if c in "▀▄█"} == {"▄"}


def test_rows_beyond_a_limit_say_how_and_others_say_nothing():
    lines = drawn(row("over", OVERFLOW, BROKEN), row("sunk", FITS, SUNK), row("good", FITS, FITS))
    assert line_of("over", lines).endswith("▀ overflow ▄ inf/NaN")
    assert line_of("sunk", lines).endswith("▄ 98 % to 0")
    assert line_of("good", lines).endswith("│")


def test_the_blamed_row_has_an_arrow_and_no_other():
    lines = drawn(row("a"), row("b", OVERFLOW, blamed=True))
    assert [line[2] for line in lines if line.startswith("▶")] == ["b"]


@pytest.mark.parametrize("width", [40, 41, 63, 64, 80, 137])
@pytest.mark.parametrize("fmt", [FP16, BF16], ids=["fp16", "bf16"])
def test_no_line_is_wider_than_the_terminal(width, fmt):
    rows = [row("a.very.long.name.of.a.module." + "x" * i, OVERFLOW, SUNK, format=fmt) for i in range(30)]
    assert max(map(len, drawn(*rows, width=width))) <= width


def test_more_than_twenty_modules_are_cut_and_counted():
    assert drawn(*[row(f"m{i}", OVERFLOW) for i in range(54)])[-1].strip() == "… 34 more, 34 beyond a limit"
    lines = drawn(*[row(f"m{i}") for i in range(42)])
    assert lines[-1].strip() == "… 34 more within the limits"
    assert sum("│" in line for line in lines) == 8
    assert "more" not in drawn(row())[-1]


def test_nothing_is_drawn_of_nothing():
    assert draw_step([]).plain == ""


def printed(diagnosis: Diagnosis, *, terminal: bool = False, width: int = 80) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=terminal, color_system="standard" if terminal else None
    )
    print_diagnosis(diagnosis, console)
    return console.file.getvalue()


def diagnosis(*chart: Row) -> Diagnosis:
    finding = Finding(CAUSES["activation-overflow"], "seen", "fix", module="b")
    return Diagnosis("net.py", "fp16-mixed", (finding,), 1.0, chart=chart)


def test_the_chart_comes_after_the_finding():
    lines = printed(diagnosis(row("b", OVERFLOW, blamed=True))).splitlines()
    assert lines[0].startswith("activation-overflow")
    starts = [line[:5] for line in lines]
    assert starts.index("  run") < starts.index("▶ b  ")


def test_without_a_trace_there_is_no_chart():
    assert "ceiling" not in printed(diagnosis())
    assert "ceiling" in printed(diagnosis(row("b")))


def test_colours_are_for_terminals_only():
    assert "\x1b" not in printed(diagnosis(row("b", OVERFLOW)))
    assert "\x1b[31m" in printed(diagnosis(row("b", OVERFLOW)), terminal=True)


def test_names_are_never_read_as_markup_nor_move_the_cursor():
    text = printed(diagnosis(row("[red]x[/red]"), row("a\x1b[2Jb\nc")), width=120)
    assert "[red]x[/red]" in text
    assert "\x1b" not in text
    assert "a [2Jb c" in text
